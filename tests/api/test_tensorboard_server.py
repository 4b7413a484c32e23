"""gptmill tensorboard shows runs with TensorBoard files and makes charts for those without."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import Start, replace_sleep, wait_for_text
from tensorboard.backend.event_processing import data_ingester

from gptmill.api.tensorboard_server import TensorBoardServer, open_tensorboard
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.events import EvalDone, StepLogged
from gptmill.runs.trackers.run_files import JsonLines
from gptmill.runs.trackers.tensorboard import TensorBoard


def make_run(logdir: Path, name: str, *, has_files: bool) -> RunDirectory:
    run = create_run(str(logdir), name, RunConfig())
    trackers = [JsonLines(run.events, 0), *([TensorBoard(run.tensorboard, 0)] if has_files else [])]
    for tracker in trackers:
        for step in (1, 2, 3):
            tracker.track(StepLogged(step, step / 8, 2.5, 6e-4, 1.25, 4321.0, 3725.0))
        tracker.track(EvalDone(3, 3.25, 64, 0.1))
        tracker.close()
    return run


def fetch(url: str) -> object:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())


def test_all_runs_of_a_folder_are_served_with_or_without_files(tmp_path: Path) -> None:
    made = make_run(tmp_path, "with", has_files=True)
    before = sorted(path.name for path in made.path.iterdir())
    bare = make_run(tmp_path, "without", has_files=False)
    create_run(str(tmp_path), "empty", RunConfig())
    with open_tensorboard(logdir=str(tmp_path)) as server:
        assert server.rebuilt == ("without",)
        assert fetch(server.url + "data/runs") == ["with", "without"]
        for name in ("with", "without"):
            points = fetch(f"{server.url}data/plugin/scalars/scalars?run={name}&tag=loss%2Ftrain")
            assert [(step, value) for _, step, value in points] == [(1, 2.5), (2, 2.5), (3, 2.5)]
        folder = Path(server.folder.name)
    assert not folder.exists()
    assert sorted(path.name for path in made.path.iterdir()) == before
    assert not bare.tensorboard.exists()


def test_only_local_names_are_answered_unless_the_network_is_served(tmp_path: Path) -> None:
    make_run(tmp_path, "a", has_files=False)

    def ask(server: TensorBoardServer, *hosts: str) -> set[tuple[int, str]]:
        answers = set()
        for host in hosts:
            connection = HTTPConnection("127.0.0.1", urlsplit(server.url).port or 0, timeout=30)
            connection.request("GET", "/data/runs", headers={"Host": host})
            answer = connection.getresponse()
            answers.add((answer.status, answer.read().decode()))
            connection.close()
        return answers

    own = ("localhost", "LOCALHOST:80", "localhost.:1", "127.0.0.1", "127.1.2.3:65535", "[::1]", "[::1]:6006")
    strange = ("evil.example", "evil.example:6006", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.5")
    damaged = ("", "[::1", "[]", ":80", "evil.example]", "localhost localhost")
    with open_tensorboard(logdir=str(tmp_path), port=0) as server:
        ((status, answer),) = ask(server, *own)
        assert (status, json.loads(answer)) == (200, ["a"])
        ((status, answer),) = ask(server, *strange, *damaged)
        assert status == 403
        assert re.fullmatch(r"This TensorBoard answers to localhost only; [^\n]*--host 0.0.0.0 [^\n]*\n", answer)
    with open_tensorboard(logdir=str(tmp_path), port=0, host="0.0.0.0") as server:
        ((status, _),) = ask(server, *own, *strange)
        assert status == 200


def test_a_closed_server_reads_the_files_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "a", has_files=False)
    is_closed = threading.Event()
    replace_sleep(monkeypatch, data_ingester, lambda _seconds: is_closed.wait())
    before = set(threading.enumerate())
    with open_tensorboard(logdir=str(tmp_path)):
        (reloader,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "Reloader")
    is_closed.set()
    reloader.join(30)
    assert not reloader.is_alive()


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    for port in (-1, 65_536):
        with pytest.raises(UserError, match=f"--port {port}: must lie between 0"):
            open_tensorboard(logdir=str(tmp_path), port=port)
    with pytest.raises(UserError, match="has no runs"):
        open_tensorboard(logdir=str(tmp_path))
    create_run(str(tmp_path), "new", RunConfig())
    with pytest.raises(UserError, match="run new has logged nothing yet"):
        open_tensorboard("new", logdir=str(tmp_path))
    make_run(tmp_path, "a", has_files=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="try another --port"):
            open_tensorboard("a", logdir=str(tmp_path), port=taken.getsockname()[1])


def test_the_verb_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path, start: Start) -> None:
    make_run(tmp_path / "runs", "a", has_files=False)
    with (tmp_path / "output").open("w") as output:
        process = start("tensorboard", "a", stdout=output)
    wait_for_text(process, tmp_path / "output", "TensorBoard: http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "a: as it is now, from its events.jsonl" in (tmp_path / "output").read_text(encoding="utf-8")
