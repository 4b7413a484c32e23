"""A best model that the disk has no time for yet waits in host memory, and training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.runs.checkpoints import background_writer
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo
from gptmill.runs.checkpoints.storage import load_checkpoint, read_step, save_checkpoint
from gptmill.runs.checkpoints.tiers import BEST, LATEST, make_rolling_name, read_tiers
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.world import World
from gptmill.training.checkpointing import Checkpointer

SECONDS = 30


@dataclass
class State:
    """What a checkpointer needs of a training state."""

    step: int = 0
    weight: Tensor = field(default_factory=lambda: torch.zeros(4))

    def make_checkpoint(self, values: dict[str, Any]) -> Checkpoint[Tensor]:
        return Checkpoint(self.step, {"model": {"weight": self.weight}}, values)

    def train_to(self, step: int) -> None:
        self.step = step
        self.weight.fill_(step)


class SlowDisk:
    """Begins to write, and goes on once it is released."""

    def __init__(self) -> None:
        self.is_released = threading.Event()
        self.written: list[int] = []

    def save(self, folder: Path, checkpoint: Checkpoint[Tensor]) -> CheckpointInfo:
        assert self.is_released.wait(SECONDS)
        self.written.append(checkpoint.step)
        return save_checkpoint(folder, checkpoint)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(background_writer, "save_checkpoint", disk.save)
    yield disk
    disk.is_released.set()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def checkpointer(run: RunDirectory) -> Iterator[Checkpointer]:
    run.checkpoints.mkdir(parents=True)
    with Checkpointer(run, RunConfig(), {}, World(0, 1, torch.device("cpu")), 0) as checkpointer:
        yield checkpointer


def save(checkpointer: Checkpointer, state: State, *steps: int, tiers: tuple[str, ...] = (BEST,)) -> None:
    for step in steps:
        state.train_to(step)
        checkpointer.save(state, list(tiers), lambda: None)  # type: ignore[arg-type]


def list_tiers(run: RunDirectory) -> dict[str, tuple[int, float]]:
    """The step of each tier, and the value of its weights."""
    return {
        tier: (read_step(path), load_checkpoint(path, ("model",)).tensors["model"]["weight"].mean().item())
        for tier, path in read_tiers(run.checkpoints).items()
    }


def test_the_newest_best_model_takes_the_place_of_the_one_that_waits(
    disk: SlowDisk, run: RunDirectory, checkpointer: Checkpointer
) -> None:
    state = State()
    for step in (1, 3, 5):  # returns although the disk has not written the first one
        save(checkpointer, state, step)
        state.train_to(step + 1)
        checkpointer.take_snapshot(state)  # for a rollback
    assert disk.written == []
    disk.is_released.set()
    assert checkpointer.finish(lambda: None)
    assert disk.written == [1, 5]
    assert list_tiers(run)[BEST] == (5, 5.0)


def test_it_is_saved_once_the_disk_is_free(disk: SlowDisk, run: RunDirectory, checkpointer: Checkpointer) -> None:
    save(checkpointer, State(), 1, 2)
    disk.is_released.set()
    for _ in range(1000 * SECONDS):
        checkpointer.collect()
        if disk.written == [1, 2] and list_tiers(run).get(BEST) == (2, 2.0):
            break
        threading.Event().wait(0.001)
    assert list_tiers(run)[BEST] == (2, 2.0)


def test_another_checkpoint_comes_after_it(disk: SlowDisk, run: RunDirectory, checkpointer: Checkpointer) -> None:
    state, rolling = State(), make_rolling_name(3)
    save(checkpointer, state, 1, 2)
    disk.is_released.set()
    save(checkpointer, state, 3, tiers=(rolling,))
    assert checkpointer.finish(lambda: None)
    assert disk.written == [1, 2, 3]
    found = list_tiers(run)
    assert (found[BEST], found[LATEST], found[rolling]) == ((2, 2.0), (3, 3.0), (3, 3.0))


def test_a_rollback_undoes_it(disk: SlowDisk, run: RunDirectory, checkpointer: Checkpointer) -> None:
    save(checkpointer, State(), 1, 2)
    checkpointer.roll_back(1)
    disk.is_released.set()
    assert checkpointer.finish(lambda: None)
    assert list_tiers(run)[BEST] == (1, 1.0)
