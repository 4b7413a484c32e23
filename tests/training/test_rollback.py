"""A run that meets poisoned data or gradients goes back, leaves the data out, and comes to where it should be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, make_shards, open_tiny
from torch import Tensor

from gptmill.data.batches.row_reader import HostReader, RowLocations, Rows
from gptmill.data.shards.opening import TokenShards
from gptmill.training.skip_ranges import add_skip_range, find_unskipped
from gptmill.training.spike_detector import SpikeDetector, Verdict

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"max_lr": 1e-2, "guard_window": 16, "max_skips": 3, "max_rollbacks": 3}
POISON = (8 * 39, 8 * 40)  # the data of step 40


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


@dataclass
class RollbackRun:
    """The loop's part: snapshots, and going back to them."""

    tiny: Tiny
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def train(self, steps: int) -> None:
        state, self.detector = self.tiny.state, SpikeDetector(self.tiny.config.guard)
        self.keep_snapshot()
        while state.step < steps:
            stats = self.tiny.step()
            metrics = stats.read()
            self.losses[stats.step], self.windows[stats.step] = metrics.loss, stats.windows
            verdict = self.detector.check(stats.make_observation(metrics))
            if verdict.kind != "fine":
                self.verdicts.append(verdict)
            if verdict.kind == "give_up":
                return
            if verdict.kind == "rollback":
                self.roll_back(verdict, stats.step)
            elif state.step % 10 == 0:
                self.keep_snapshot()

    def keep_snapshot(self) -> None:
        state = self.tiny.state
        parts = state.model.state_dict(), state.optimizer.state_tensors(), self.detector.state_dict()
        self.snapshots.append({"step": state.step, "windows": state.windows_read, "parts": copy.deepcopy(parts)})

    def roll_back(self, verdict: Verdict, from_step: int) -> None:
        state = self.tiny.state
        while len(self.snapshots) > 1 and self.snapshots[-1]["step"] >= verdict.first_step:
            self.snapshots.pop()
        snapshot = copy.deepcopy(self.snapshots[-1])
        model, optimizer, detector = snapshot["parts"]
        state.model.load_state_dict(model)
        state.optimizer.load_state(optimizer)
        self.detector.load_state_dict(detector)
        self.detector.note_rollback(verdict, from_step)
        state.step, state.windows_read = snapshot["step"], snapshot["windows"]
        state.skipped_windows = add_skip_range(state.skipped_windows, verdict.windows, state.windows_read)


def poison_windows(tiny: Tiny, windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens instead of the data of these windows."""
    poisoned = {tiny.sampler.find(start).starts.tobytes() for start in range(*windows, tiny.sampler.samples_per_batch)}
    read = HostReader.read

    def read_poisoned(reader: HostReader, places: RowLocations) -> Rows:
        rows = read(reader, places)
        if places.starts.tobytes() not in poisoned:
            return rows
        return Rows(torch.randint(256, rows.tokens.shape, generator=torch.Generator().manual_seed(0)))

    monkeypatch.setattr(HostReader, "read", read_poisoned)


def poison_gradients(tiny: Tiny, is_poisoned: Callable[[], bool]) -> None:
    """Gradients that are no metrics while the step to do is a poisoned one."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.nan if is_poisoned() else gradient

    next(tiny.state.model.parameters()).register_hook(spoil)


def assert_as_if_left_out_from_the_start(run: RollbackRun, shards: TokenShards, steps: int) -> None:
    """Bit by bit the run that knew from its start what to leave out."""
    clean = open_tiny(shards, **FIELDS)
    clean.state.skipped_windows = run.tiny.state.skipped_windows
    for step in range(1, steps + 1):
        assert clean.step().read().loss == run.losses[step]
    expected = clean.copy_parameters()
    for name, parameter in run.tiny.copy_parameters().items():
        assert parameter.equal(expected[name]), name


def test_poisoned_data_is_left_out(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RollbackRun(open_tiny(shards, **FIELDS))
    poison_windows(run.tiny, POISON, monkeypatch)
    run.train(50)
    assert [(verdict.kind, verdict.first_step) for verdict in run.verdicts] == [("rollback", 39)]
    assert run.verdicts[0].reason.startswith("loss ")
    assert run.tiny.state.skipped_windows == [(8 * 38, 8 * 40)]
    assert [run.windows[step] for step in (38, 39, 50)] == [(296, 304), (320, 328), (408, 416)]
    assert_as_if_left_out_from_the_start(run, shards, 50)


def test_without_the_guard_the_poison_is_learnt(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RollbackRun(open_tiny(shards, **FIELDS, guard="off"))
    poison_windows(run.tiny, POISON, monkeypatch)
    run.train(41)
    assert run.verdicts == []
    assert run.losses[40] > run.losses[39] + 1


def test_single_gradients_that_are_no_numbers_cost_one_update_each(shards: TokenShards) -> None:
    run = RollbackRun(open_tiny(shards, **FIELDS))
    poison_gradients(run.tiny, lambda: run.tiny.state.step in (0, 19, 20, 30))
    run.train(50)
    assert [verdict.kind for verdict in run.verdicts] == ["skipped"] * 4
    assert run.detector.skipped == 4
    assert run.losses[50] < run.losses[25]
    assert run.windows[50] == (8 * 49, 8 * 50)


def test_data_whose_gradients_are_no_numbers_is_left_out(shards: TokenShards) -> None:
    run = RollbackRun(open_tiny(shards, **FIELDS))
    state = run.tiny.state
    poison_gradients(
        run.tiny, lambda: find_unskipped(state.skipped_windows, state.windows_read, 8) in range(8 * 29, 8 * 32)
    )
    run.train(50)
    assert [verdict.kind for verdict in run.verdicts] == ["skipped", "skipped", "rollback"]
    assert run.tiny.state.skipped_windows == [(8 * 29, 8 * 32)]
    assert run.detector.skipped == 3
    assert_as_if_left_out_from_the_start(run, shards, 50)


def test_what_comes_again_whatever_is_left_out_ends_the_run(shards: TokenShards) -> None:
    run = RollbackRun(open_tiny(shards, **FIELDS))
    poison_gradients(run.tiny, lambda: run.tiny.state.step >= 30)
    run.train(50)
    assert [verdict.kind for verdict in run.verdicts if verdict.kind != "skipped"] == ["rollback"] * 3 + ["give_up"]
    assert "3 times in a row" in run.verdicts[-1].reason
