"""Runs `gptmill train` as child processes, timed from process start, and reads their events."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.data.remote_fs import is_remote
from gptmill.data.shards.opening import holds_shards
from gptmill.experiments.child_run import interrupt_on_termination, open_child_run
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.event_log import read_records

POLL_SECONDS = 0.2
SHOWN_CHARACTERS = 3000  # of the output of a failed run
PROCESS_NAME = "process.json"
USER_ERROR, INTERRUPTED = 2, 130

ENDED = threading.Event()  # tells training threads to stop

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The events of a run; times are those of `time.time()`."""

    events: list[Event]
    started: float
    """Start of the process; if that was not recorded, start of training."""
    origin: dict[str, Any] | None = None
    """Recipe, flags and code of the run; None if they were not recorded."""

    def select(self, kind: str) -> list[Event]:
        """Returns the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def is_finished(self) -> bool:
        return any(event["reason"] == "finished" for event in self.select("RunFinished"))

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first."""
        return max((event["step"] for event in self.select("StepLogged")), default=0)


def run_guarded(main: Callable[[], int]) -> int:
    """Runs a benchmark. On Ctrl-C or a signal it also ends the training processes that it started."""
    try:
        with interrupt_on_termination():
            return main()
    except UserError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def open_jobs(count: int) -> Iterator[ThreadPoolExecutor]:
    """Opens a pool of threads that train concurrently; Ctrl-C or a signal ends their training processes too."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        ENDED.set()
        pool.shutdown(cancel_futures=True)
        raise


def check_corpus(data_dir: str) -> None:
    """Raises UserError if there is no prepared corpus."""
    if not holds_shards(data_dir):
        raise UserError(f"{data_dir} holds no prepared corpus; create it with: gptmill prepare TEXT --out {data_dir}")


def make_absolute(data_dir: str) -> str:
    """Returns a path or URI that is valid in every working directory."""
    return data_dir if is_remote(data_dir) else str(Path(data_dir).resolve())


def make_run_folder(name: str, logdir: Path) -> Path:
    """Returns the run folder of a row."""
    return logdir / name.replace(",", "").replace(" ", "_")


def read_run(path: Path) -> Run | None:
    """Reads a run from its folder or events.jsonl; None if it has not started.

    Raises UserError for a file that is not an events.jsonl.
    """
    path = path / "events.jsonl" if path.is_dir() else path
    if not path.is_file():
        return None
    try:
        events: list[Event] = read_records(path)
        times = [event["time"] for event in events if event["event"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not the events.jsonl of a run; name another, or remove it") from None
    if not events:
        return None
    noted = path.parent / PROCESS_NAME
    if not noted.is_file():
        return Run(events, times[0])
    process = json.loads(noted.read_text(encoding="utf-8"))
    return Run(events, process["started"], process["origin"])


def obtain(
    folder: Path,
    recipe: str,
    flags: list[str],
    seconds: float,
    last_step: int | None = None,
    before_end: Callable[[], None] = lambda: None,
    *,
    is_alone: bool = True,
) -> Run | None:
    """Returns the run in a folder; trains it unless it is complete there with the same code, recipe and flags."""
    run = read_run(folder)
    if run is not None and run.origin == make_origin(recipe, flags) and is_complete(run, last_step):
        return run
    run = train(folder, recipe, flags, seconds, last_step, before_end, is_alone=is_alone)
    return run if run is not None and is_complete(run, last_step) else None


def is_complete(run: Run, last_step: int | None) -> bool:
    return run.is_finished or (last_step is not None and run.last_step >= last_step)


def make_origin(recipe: str, flags: list[str]) -> dict[str, Any]:
    """Everything that the results of a run depend on, except for the machine."""
    return {"recipe": load_recipe(recipe), "flags": flags, "code": make_code_fingerprint()}


def train(
    folder: Path,
    recipe: str,
    flags: list[str],
    seconds: float,
    last_step: int | None,
    before_end: Callable[[], None] = lambda: None,
    *,
    is_alone: bool = True,
) -> Run | None:
    """Trains from the first step; returns None on failure or timeout and prints the output of a failed run to stderr.

    With `last_step` the run is killed once it has logged that step, which skips its last checkpoint; `before_end` is
    called just before, while the device is busy. Checkpoints are removed. A run that shares the device uses a private
    cache: autotuning results measured under contention must not reach other runs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.txt")
    where = ["--logdir", str(folder.parent), "--run_name", folder.name]
    environment = {} if is_alone else {"GPTMILL_CACHE": str(folder.parent / "cache")}
    is_enough, started = False, time.time()
    with log.open("wb") as output, open_child_run([recipe, *where, *flags], output, output, environment) as process:
        while process.poll() is None and time.time() - started < seconds and not is_enough:
            if ENDED.wait(POLL_SECONDS):
                break
            is_enough = last_step is not None and has_logged(folder, last_step)
        if is_enough:
            before_end()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if ENDED.is_set():
        return None
    if not is_enough and process.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(f"{folder.name}: failed after {time.time() - started:.0f} s:\n{text[-SHOWN_CHARACTERS:]}\n")
        return None
    noted = {"started": started, "origin": make_origin(recipe, flags)}
    (folder / PROCESS_NAME).write_text(json.dumps(noted), encoding="utf-8")
    return read_run(folder)


def has_logged(folder: Path, step: int) -> bool:
    """Whether a running process has logged a step."""
    run = read_run(folder)
    return run is not None and run.last_step >= step
