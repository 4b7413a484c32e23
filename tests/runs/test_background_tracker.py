"""A slow tracker in a thread of its own: training never waits for it, and it can never end or hang a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptmill.config.errors import UserError
from gptmill.config.run import TrackingConfig
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import EvalDone, Event, RunStarted, StepLogged, Warned
from gptmill.runs.trackers import background, requirements
from gptmill.runs.trackers.background import Background
from gptmill.runs.trackers.protocol import TrackerGroup
from gptmill.runs.trackers.requirements import check_trackers
from gptmill.runs.trackers.weights_and_biases import WeightsAndBiases


class Recorder:
    """Records what it is told, after `gate` has opened; fails at one step."""

    def __init__(self, gate: threading.Event, fails_at: int | None = None) -> None:
        self.gate, self.fails_at = gate, fails_at
        self.seen: list[int | str] = []

    def track(self, event: Event) -> None:
        self.gate.wait(30)
        if event.step == self.fails_at:
            raise OSError(28, "No space left on device")
        self.seen.append(event.step)

    def rewind(self, step: int) -> None:
        self.seen.append(f"rewind {step}")

    def close(self) -> None:
        self.seen.append("closed")


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def open_background(recorder: Recorder, abandoned: list[str] | None = None) -> Background:
    abandon: Callable[[], None] = lambda: (abandoned if abandoned is not None else []).append("abandoned")  # noqa: E731
    return Background("Slow", lambda: recorder, abandon)


def test_events_rewinds_and_the_end_arrive_in_order_though_nobody_waits_for_them() -> None:
    recorder = Recorder(threading.Event())
    with TrackerGroup([open_background(recorder)]) as trackers:
        for step in (1, 2, 3):
            trackers.track(Warned(step, "disk", ""))
        trackers.rewind(2)
        trackers.track(Warned(3, "disk", ""))
        assert recorder.seen == []
        recorder.gate.set()
    assert recorder.seen == [1, 2, 3, "rewind 2", 3, "closed"]


def test_one_that_fails_is_reported_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    abandoned: list[str] = []
    slow = open_background(Recorder(open_gate(), fails_at=2), abandoned)
    with TrackerGroup([slow]) as trackers:
        trackers.track(Warned(1, "disk", ""))
        trackers.track(Warned(2, "disk", ""))
        slow._thread.join(30)
        trackers.track(Warned(3, "disk", ""))
        trackers.track(Warned(4, "disk", ""))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Slow failed at step 3 ([Errno 28] No space left on device); the run continues" in error
    assert abandoned == ["abandoned"]


def test_one_that_cannot_be_built_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Recorder:
        raise ConnectionError("no route to host")

    with TrackerGroup([Background("Slow", build)]):
        pass
    assert "Slow failed while closing (no route to host)" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["MAX_QUEUED", "CLOSE_SECONDS"])
def test_one_that_is_stuck_is_given_up(
    limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, limit, 2 if limit == "MAX_QUEUED" else 0.0)
    abandoned: list[str] = []
    recorder = Recorder(threading.Event())
    with TrackerGroup([open_background(recorder, abandoned)]) as trackers:
        for step in range(1, 6):
            trackers.track(Warned(step, "disk", ""))
    recorder.gate.set()
    assert capsys.readouterr().err.count("the run continues without it") == 1
    assert abandoned == ["abandoned"]


WANDB = TrackingConfig(use_wandb=True)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_extra_is_told_with_the_line_that_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _name: None)
    config = TrackingConfig(use_wandb=name == "wandb", use_trackio=name == "trackio")
    with pytest.raises(UserError, match=rf"pip install 'gptmill\[{name}\]'"):
        check_trackers(config)


def test_wandb_on_line_needs_a_key_before_training_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"wandb login.*--wandb_mode offline"):
        check_trackers(WANDB)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n", encoding="utf-8")
    check_trackers(WANDB)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(WANDB)
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(UserError, match="sideways is not one of online, offline, disabled"):
        check_trackers(WANDB)


class FakeRun:
    """A run of W&B, which takes no step back."""

    def __init__(self, rows: dict[int, dict[str, Any]]) -> None:
        self.rows, self.summary, self.url = rows, dict[str, Any](), "https://wandb.example/a"
        self.starting_step = self._first = max(rows, default=-1) + 1

    def log(self, values: dict[str, Any], step: int) -> None:
        assert step >= self._first, "W&B would ignore it"
        self._first = step
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("ends_there", [False, True])
def test_wandb_gets_an_evaluation_that_a_stop_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_there: bool
) -> None:
    rows: dict[int, dict[str, Any]] = {}
    fake = SimpleNamespace(init=lambda **_options: FakeRun(rows), Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start = RunStarted(0, "a", 20, 128, 1, "CPU", "fp32", 1, "x", "byte:1", "0.1", "2.9", None)
    steps = [StepLogged(step, 0.0, 2.5, 6e-4, 1.25, 1000.0, 60.0) for step in range(5)]
    tracker = WeightsAndBiases(RunDirectory(tmp_path), WANDB)
    for event in (start, *steps[1:3]):
        tracker.track(event)
    tracker.close()  # at a stop, while step 2 was evaluated
    for attempt in range(2):  # the second has nothing new
        tracker = WeightsAndBiases(RunDirectory(tmp_path), WANDB, is_evaluated=False)
        for event in (replace(start, step=2), EvalDone(2, 3.0 + attempt, 64, 0.1), *steps[3 : 3 if ends_there else 5]):
            tracker.track(event)
        tracker.close()
    assert {step: row["loss/val"] for step, row in rows.items() if "loss/val" in row} == {3: 3.0}
    assert [step for step, row in rows.items() if "loss/train" in row] == ([1, 2] if ends_there else [1, 2, 3, 4])
