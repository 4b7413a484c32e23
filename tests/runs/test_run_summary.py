"""The summary of a run: its progress, its losses and its state, whatever its files have been through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptmill.config.run import RunConfig
from gptmill.runs.directory import RunDirectory, create_run, list_folders, list_runs
from gptmill.runs.event_json import to_json
from gptmill.runs.events import (
    EvalDone,
    Event,
    LastStepMoved,
    RunCrashed,
    RunFinished,
    RunStarted,
    SampleDrawn,
    StepLogged,
)
from gptmill.runs.run_lock import lock_run
from gptmill.runs.run_summary import measure_tree, summarize_run


def start(step: int, moment: float) -> RunStarted:
    return RunStarted(step, "r", 100, 64, 12345, "CPU", "fp32", 1, "c", "t", "0", "2", None, time=moment)


def log(step: int, loss: float, moment: float, speed: float = 1000.0) -> StepLogged:
    return StepLogged(step, 0.0, loss, 0.1, 1.0, speed, 1.0, time=moment)


def write(path: Path, events: list[Event], more: str = "") -> None:
    path.write_text("".join(to_json(event) + "\n" for event in events) + more, encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Four steps and three evaluations, of which the second is the best, in two processes."""
    run = create_run(str(tmp_path), "one", RunConfig())
    evals = [EvalDone(step, loss, 64, 0.1, time=5.0) for step, loss in ((0, 5.0), (2, 2.5), (4, 3.0))]
    steps: list[Event] = [log(step, 6.0 - step, 10.0 * step, 500.0 * step) for step in range(1, 5)]
    write(run.events, [start(0, 1.0), *steps, *evals, SampleDrawn(4, "EvalDone", "StepLogged", time=5.0)])
    write(run.history, [start(0, 1.0), RunCrashed(3, "killed", time=31.0), start(2, 40.0)])
    return run


def test_the_last_step_is_the_one_that_a_budget_has_moved_it_to(run: RunDirectory) -> None:
    write(run.events, [start(0, 1.0), log(1, 6.0, 2.0), LastStepMoved(1, 60), LastStepMoved(1, 70)])
    assert summarize_run(run).max_steps == 70
    write(run.events, [start(0, 1.0), LastStepMoved(1, 60), start(1, 3.0)])
    assert summarize_run(run).max_steps == 100


def test_a_summary_says_how_far_and_how_well(run: RunDirectory) -> None:
    summary = summarize_run(run)
    assert (summary.name, summary.step, summary.max_steps, summary.parameters) == ("one", 4, 100, 12345)
    assert (summary.train_loss, summary.val_loss, summary.best_loss) == (2.0, 3.0, 2.5)
    assert (summary.tokens, summary.tokens_per_second) == (256, 1250.0)
    assert (summary.started, summary.seconds) == (1.0, 30.0)
    assert summary.size_bytes == sum(path.stat().st_size for path in run.path.iterdir())
    assert summary.remarks == ()


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (RunFinished(4, "finished", 1.0), "finished"),
        (RunFinished(4, "stopped early: no progress", 1.0), "finished"),
        (RunFinished(4, "stopped by SIGTERM", 1.0), "stopped"),
        (RunFinished(4, "gave up: 3 rollbacks", 1.0), "diverged"),
        (RunCrashed(4, "RuntimeError"), "crashed"),
        (None, "crashed"),
    ],
)
def test_the_state_is_how_the_last_process_ended(run: RunDirectory, end: Event | None, state: str) -> None:
    write(run.history, [start(0, 1.0), RunCrashed(3, "killed"), start(2, 40.0), *([end] if end else [])])
    assert summarize_run(run).state == state
    with lock_run(run):
        assert summarize_run(run).state == "running"


def test_a_run_of_an_older_version_has_its_history_in_its_events(run: RunDirectory) -> None:
    run.history.unlink()
    with run.events.open("a", encoding="utf-8") as file:
        file.write(to_json(RunFinished(4, "finished", 1.0)) + "\n")
    assert summarize_run(run).state == "finished"


def test_a_run_that_has_not_started_has_no_numbers(tmp_path: Path) -> None:
    summary = summarize_run(create_run(str(tmp_path), "new", RunConfig()))
    assert (summary.state, summary.step, summary.train_loss, summary.started) == ("not started", 0, None, None)


@pytest.mark.parametrize("damage", ["\x00\xff", "[", "num_layers = 'many'", "made_up = 1"])
def test_a_damaged_config_is_a_remark(run: RunDirectory, damage: str) -> None:
    run.config.write_bytes(damage.encode("latin-1"))
    (remark,) = summarize_run(run).remarks
    assert "config.toml" in remark
    assert "\n" not in remark
    assert summarize_run(run).step == 4


def test_damaged_folders_are_listed_and_others_are_not(run: RunDirectory, tmp_path: Path) -> None:
    run.config.unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".gone.deleted").mkdir()
    (tmp_path / ".gone.deleted/config.toml").touch()
    (tmp_path / "odd/checkpoints").mkdir(parents=True)
    (tmp_path / "odd/events.jsonl").mkdir()
    assert [each.path.name for each in list_folders(str(tmp_path))] == ["odd", "one"]
    assert list_runs(str(tmp_path)) == []
    odd, one = map(summarize_run, list_folders(str(tmp_path)))
    assert one.remarks == ("it has no config.toml",)
    assert odd.remarks == ("it has no config.toml", "events.jsonl cannot be read: it is a folder, not a regular file")


def test_hostile_events_are_summarised_without_them(run: RunDirectory) -> None:
    step, evaluated = json.loads(to_json(log(5, 1.0, 50.0))), json.loads(to_json(EvalDone(5, 1.0, 64, 0.1)))
    hostile = [
        {**step, "event": ["StepLogged"]},
        *({**step, "step": value} for value in (10**400, "9", None, -7)),
        *({**step, "loss": value} for value in ("low", [])),
        *({**evaluated, "val_loss": value} for value in ("low", 10**400, {})),
    ]
    lines = "\n".join([*map(json.dumps, hostile), "[" * 10_000, "\udc80".encode(errors="surrogateescape").hex(), "{"])
    before = summarize_run(run)
    with run.events.open("a", encoding="utf-8") as file:
        file.write(lines)
    after = summarize_run(run)
    assert (after.step, after.train_loss, after.best_loss) == (before.step, before.train_loss, before.best_loss)


def test_what_links_lead_to_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 5000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(tmp_path / "large")
    (tmp_path / "folder/up").symlink_to(tmp_path)
    (tmp_path / "folder/small").write_bytes(b"x")
    assert measure_tree(tmp_path / "folder") < 1000
