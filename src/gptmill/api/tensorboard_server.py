"""open_tensorboard: TensorBoard for one run or many, also for those trained without it."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gptmill.api.progress import show_amount
from gptmill.config.errors import UserError
from gptmill.runs.directory import RunDirectory, find_run, list_runs
from gptmill.runs.event_log import read_events
from gptmill.runs.trackers.tensorboard import TensorBoard, has_tensorboard_files

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

MAX_PORT = 65_535
REFUSAL = b"This TensorBoard answers to localhost only; open a tunnel, or start it with --host 0.0.0.0 for every name\n"


@dataclass(frozen=True)
class TensorBoardServer:
    """TensorBoard in a thread of this process, until it is closed or the process ends."""

    url: str
    rebuilt: tuple[str, ...]
    """The runs whose charts were made from events.jsonl, as it was then."""
    folder: Any
    server: Any
    board: Any

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.board._ingester._reload_interval = 0  # the thread that follows the files ends after its next look
        self.folder.cleanup()

    def __enter__(self) -> TensorBoardServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def open_tensorboard(
    run: str | None = None, *, logdir: str = "runs", port: int | None = None, host: str = "127.0.0.1"
) -> TensorBoardServer:
    """Serves TensorBoard for a run, by its name or path, or for all runs of `logdir`."""
    if port is not None and not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}: must lie between 0 (any free one) and {MAX_PORT}")
    runs = [find_run(run, logdir)] if run else list_runs(logdir)
    if not runs:
        raise UserError(f"{logdir}/ has no runs; train one, or name another folder with --logdir")
    folder = tempfile.TemporaryDirectory(prefix="gptmill-tensorboard-", ignore_cleanup_errors=True)
    try:
        rebuilt = tuple(each.path.name for each in runs if add_run(each, Path(folder.name)))
        if run and not any(Path(folder.name).iterdir()):
            raise UserError(f"run {run} has logged nothing yet; wait for its first step")
        board, server = start_server(folder.name, host, port)
    except BaseException:
        folder.cleanup()
        raise
    return TensorBoardServer(server.get_url(), rebuilt, folder, server, board)


def add_run(run: RunDirectory, folder: Path) -> bool:
    """Links the run's TensorBoard files into the folder, so that they are followed; True if it made them anew."""
    if has_tensorboard_files(run.tensorboard):
        (folder / run.path.name).symlink_to(run.tensorboard.resolve())
        return False
    events = read_events(run.events, missing_ok=True)
    if not events:
        return False
    tracker = TensorBoard(folder / run.path.name, 0)
    with show_amount(f"reading {run.path.name}", "events") as report:
        for done, event in enumerate(events):
            tracker.track(event)
            report(done, len(events))
    tracker.close()
    return True


def start_server(folder: str, host: str, port: int | None) -> tuple[Any, Any]:
    """TensorBoard with its web server, and the thread that follows the files."""

    def make_server(app: WSGIApplication, flags: Any) -> Any:
        is_private = is_local(f"[{host}]" if ":" in host else host)
        return program.create_port_scanning_werkzeug_server(answer_local_names(app) if is_private else app, flags)

    with warnings.catch_warnings(action="ignore"):  # of deprecated parts of its own
        from tensorboard import default, program

        board = program.TensorBoard(default.get_plugins(), server_class=make_server)
    ports = [] if port is None else ["--port", str(port)]
    board.configure(["tensorboard", "--logdir", folder, "--host", host, "--load_fast", "false", *ports])
    try:
        server = board._make_server()
    except program.TensorBoardServerException as error:
        where = f"{host}, port {port or 6006}"
        raise UserError(f"TensorBoard cannot serve on {where}: {error.msg}; try another --port") from None
    threading.Thread(target=server.serve_forever, name="tensorboard", daemon=True).start()
    return board, server


def answer_local_names(app: WSGIApplication) -> WSGIApplication:
    """Refuses other names: a web page on one that is made to point here could read what its visitor's browser gets."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_local(environ.get("HTTP_HOST", "localhost")):  # which every browser sends
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [REFUSAL]

    return answer


def is_local(authority: str) -> bool:
    """Whether a name or an address, with or without a port, is that of a machine for itself."""
    try:
        name = urlsplit(f"//{authority}").hostname or ""
        return name.removesuffix(".") == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
