"""gptmill runs, as a user runs it: the table of all runs, the comparison, and the removal."""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gptmill.cli.main import run_guarded
from gptmill.config.run import RunConfig
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.event_json import to_json
from gptmill.runs.events import EvalDone, Event, RunFinished, RunStarted, StepLogged
from gptmill.runs.run_lock import lock_run

Capture = pytest.CaptureFixture[str]


def make_run(name: str, last: int, loss: float, max_lr: float = 1e-3) -> RunDirectory:
    """A run of ten steps that got to `last`, with an evaluation at every second."""
    config = RunConfig()
    run = create_run("runs", name, replace(config, optimizer=replace(config.optimizer, max_lr=max_lr)))
    now = time.time() - 7300
    started = RunStarted(0, name, 10, 64, 124_400_000, "CPU", "fp32", 1, "c", "t", "0", "2", None, time=now)
    events: list[Event] = [started]
    for step in range(1, last + 1):
        events.append(StepLogged(step, 0.0, loss + 10 - step, 0.1, 1.0, 1500.0, 1.0, time=now + step))
        if step % 2 == 0:
            events.append(EvalDone(step, loss - step, 64, 0.1, time=now + step))
    ended = RunFinished(last, "finished" if last == 10 else "stopped by SIGTERM", 1.0, time=now + 100)
    run.events.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    run.history.write_text(f"{to_json(started)}\n{to_json(ended)}\n", encoding="utf-8")
    return run


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
    monkeypatch.chdir(tmp_path)
    return [make_run("alpha", 10, 15.0), make_run("beta", 6, 12.0, max_lr=3e-3)]


def call(*words: str) -> int:
    return run_guarded(["runs", *words])


def read_rows(capsys: Capture) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_list_is_a_table_of_all_runs(runs: list[RunDirectory], capsys: Capture) -> None:
    (runs[1].path / "ballast").write_bytes(b"x" * 1_100_000)
    with lock_run(make_run("gamma", 4, 99.0)):
        assert call("list", "--sort", "name") == 0
    head, alpha, beta, gamma, total = read_rows(capsys)
    assert head == "run|params|step|train loss|val loss|best|tokens/s|state|age|MB|remarks".split("|")
    assert alpha[:9] == ["alpha", "124.4M", "10 of 10", "15.0000", "5.0000", "5.0000", "1.5K", "finished", "2 h"]
    assert beta[:9] == ["beta", "124.4M", "6 of 10", "16.0000", "6.0000", "6.0000", "1.5K", "stopped", "2 h"]
    assert beta[9] == "1.1"
    assert gamma[7] == "running"
    assert total[0].startswith("3 runs, 1.1 MB")


@pytest.mark.parametrize(
    ("sort", "order"), [("name", "alpha beta"), ("loss", "alpha beta"), ("size", "beta alpha"), ("step", "alpha beta")]
)
def test_list_is_sorted(sort: str, order: str, runs: list[RunDirectory], capsys: Capture) -> None:
    (runs[1].path / "ballast").write_bytes(b"x" * 100_000)
    assert call("list", "--sort", sort) == 0
    assert [row[0] for row in read_rows(capsys)[1:3]] == order.split()


def test_damaged_runs_are_listed_with_a_remark(runs: list[RunDirectory], capsys: Capture) -> None:
    runs[0].config.write_text("num_layers = [", encoding="utf-8")
    runs[1].events.write_text('{"event": [], "step": 1}\n[[[[\n', encoding="utf-8")
    assert call("list") == 0
    captured = capsys.readouterr()
    assert "config.toml is damaged" in captured.out
    assert captured.err == ""


def test_without_runs_it_says_so(capsys: Capture) -> None:
    assert call("list", "--logdir", "elsewhere") == 0
    assert capsys.readouterr().out == "elsewhere/ has no runs yet\n"


def test_compare_shows_options_losses_and_results(capsys: Capture) -> None:
    assert call("compare", "alpha", "beta") == 0
    output = capsys.readouterr().out
    options, losses, results = ([line.split() for line in part.splitlines()] for part in output.split("\n\n"))
    assert options == [["option", "alpha", "beta"], ["max_lr", "0.001", "0.003"]]
    assert losses[0] == ["validation", "loss"]
    assert losses[2:] == [["2", "13.0000", "10.0000"], ["4", "11.0000", "8.0000"], ["6", "9.0000", "6.0000"]]
    assert results[1] == "alpha finished 10 of 10 640 15.0000 5.0000 5.0000 1.5K 2 min".split()
    assert results[2] == "beta stopped 6 of 10 384 16.0000 6.0000 6.0000 1.5K 2 min".split()


def test_compare_of_equal_runs_says_so(capsys: Capture) -> None:
    assert call("compare", "alpha", "alpha") == 0
    assert capsys.readouterr().out.startswith("all options are equal\n\nvalidation loss\n")


def test_remove_needs_a_yes(runs: list[RunDirectory], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert call("remove", "alpha") == 2
    assert "--yes" in capsys.readouterr().err
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert call("remove", "alpha") == 1
        assert capsys.readouterr().out.endswith("nothing was removed\n")
    assert runs[0].config.exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert call("remove", "alpha") == 0
    assert not runs[0].path.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_remove_says_what_is_freed(runs: list[RunDirectory], capsys: Capture) -> None:
    (runs[0].path / "ballast").write_bytes(b"x" * 2_500_000)
    assert call("remove", "alpha", "runs/beta", "--yes") == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed runs/alpha: 2.5 MB freed",
        "removed runs/beta: 0.0 MB freed",
    ]
    assert list(Path("runs").iterdir()) == []


def test_nothing_is_removed_if_one_of_them_is_running(runs: list[RunDirectory], capsys: Capture) -> None:
    with lock_run(runs[1]):
        assert call("remove", "alpha", "beta", "--yes") == 2
    assert "runs/beta is being trained by another process" in capsys.readouterr().err
    assert all(run.config.exists() for run in runs)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the usage is"),
        (["list", "alpha"], "the usage is"),
        (["compare", "alpha"], "the usage is"),
        (["remove"], "the usage is"),
        (["weigh"], "the usage is"),
        (["compare", "alpha", "bata"], "did you mean beta?"),
        (["remove", "alpa", "--yes"], "did you mean alpha?"),
        (["list", "--yes"], "--yes applies only to"),
        (["list", "--sort", "colour"], "--sort colour"),
    ],
)
def test_mistakes_get_a_sentence(words: list[str], expected: str, capsys: Capture) -> None:
    assert call(*words) == 2
    assert expected in capsys.readouterr().err
