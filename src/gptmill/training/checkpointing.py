"""When a checkpoint is due and in which tiers, and its way from the device to the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.checkpoints.background_writer import CheckpointWriter
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.mirror import Mirror
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint, read_info, read_step
from gptmill.runs.checkpoints.tiers import BEST, make_epoch_name, make_milestone_name, make_rolling_name
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.snapshots import Snapshot, Snapshots
from gptmill.training.state import TrainState

GROUPS = ("model", "optimizer", "ema")
COPY_SECONDS = 600.0  # for which a run that ends waits for its last copy

Beat = Callable[[], None]


def list_due_tiers(state: TrainState, config: RunConfig, plan: TrainPlan, *, is_best: bool, is_last: bool) -> list[str]:
    """The tiers that the state belongs to. An epoch shorter than `checkpoint_freq` has none of its own."""
    step, checkpoints = state.step, config.checkpoints
    epochs = state.windows_read // plan.windows_per_epoch
    tiers = [make_rolling_name(step)] if is_last or step % checkpoints.checkpoint_freq == 0 else []
    if checkpoints.milestone_freq is not None and step % checkpoints.milestone_freq == 0:
        tiers.append(make_milestone_name(step))
    if epochs > state.epochs_done and plan.steps_per_epoch >= checkpoints.checkpoint_freq:
        tiers.append(make_epoch_name(epochs))
    return [*tiers, BEST] if is_best else tiers


class Checkpointer:
    """Takes snapshots and has them written, on the main rank; on the others it only keeps count."""

    def __init__(self, run: RunDirectory, config: RunConfig, origin: dict[str, Any], world: World, step: int) -> None:
        self.saved_at = step
        """The step that was saved last."""
        self._branched_at, self._branched_time = step, time.time()
        self._run, self._origin, self._is_main = run, origin, world.is_main
        self._heals = config.guard.guard == "rollback"
        self._snapshots = Snapshots(world.device, 2 if self._heals else 1)
        self._in_writing: Snapshot | None = None
        self._copier = _build_copier(config) if world.is_main else None
        self._writer: CheckpointWriter | None = None
        if world.is_main:
            self._writer = CheckpointWriter(run.checkpoints, config.checkpoints, self._copier)

    @property
    def write_seconds(self) -> float:
        """How long the last checkpoint took to become durable."""
        return self._writer.last_seconds if self._writer else 0.0

    def take_snapshot(self, state: TrainState) -> None:
        """Keeps the state as it is now, for a run that may have to go back."""
        if self._is_main and self._heals and not self._is_next_room_in_use(state):
            self._take(state, [])

    def save(self, state: TrainState, tiers: list[str], beat: Beat) -> None:
        """Has the state written; returns as soon as it is on its way off the device."""
        self.saved_at = state.step
        if self._writer is None:
            return
        started = time.monotonic()
        if self._is_next_room_in_use(state):
            self._writer.finish(beat)
        snapshot = self._in_writing = self._take(state, tiers)
        stalled_seconds = time.monotonic() - started

        def wait_for_copy() -> float:
            snapshot.arrived.wait()
            return stalled_seconds + snapshot.arrived.seconds_after(snapshot.began)

        self._writer.start(snapshot.checkpoint, tiers, wait_for_copy, beat)

    def collect(self) -> list[Event]:
        """What has become of the saves since the last call."""
        return self._writer.collect() if self._writer else []

    def finish(self, beat: Beat) -> bool:
        """Waits for the save under way, and for its copy; whether the last one is durable."""
        is_durable = self._writer.finish(beat) if self._writer else True
        if self._copier is not None:
            self._copier.finish(COPY_SECONDS, beat)
        return is_durable

    def go_back(self, step: int) -> None:
        """From here on, what is on the disk of later steps is of another past."""
        self.saved_at = min(self.saved_at, step)
        self._branched_at, self._branched_time = step, time.time()

    def find_older(self, last_step: int) -> Checkpoint | None:
        """The newest state of `last_step` or before: in memory, or else on the disk and sound."""
        if not self._is_main:
            return None
        if (snapshot := self._snapshots.find_newest(last_step)) is not None:
            return snapshot
        for path in reversed(list_step_folders(self._run.checkpoints)):
            if read_step(path) <= last_step:
                with suppress(UserError):
                    is_past = read_step(path) <= self._branched_at or read_info(path).saved_at > self._branched_time
                    if is_past:
                        return load_checkpoint(path, GROUPS)
        return None

    def _take(self, state: TrainState, tiers: list[str]) -> Snapshot:
        return self._snapshots.take(state.make_checkpoint({**self._origin, "tiers": tiers}))

    def _is_next_room_in_use(self, state: TrainState) -> bool:
        """Whether a checkpoint is still being written from the memory that the next snapshot goes to."""
        if self._writer is None or self._in_writing is None or not self._writer.is_busy:
            return False
        self._snapshots.prepare(state.make_checkpoint({}))
        return self._in_writing.room is self._snapshots.find_next_room()


@contextmanager
def open_checkpointer(
    run: RunDirectory, config: RunConfig, origin: dict[str, Any], world: World, step: int
) -> Iterator[Checkpointer]:
    """A save under way is waited for at the end, unless the user has lost patience."""
    saving = Checkpointer(run, config, origin, world, step)
    try:
        yield saving
    except Exception:
        saving.finish(lambda: None)
        raise


def _build_copier(config: RunConfig) -> Mirror | None:
    checkpoints = config.checkpoints
    if checkpoints.mirror_to is None:
        return None
    assert config.tracking.run_name is not None
    return Mirror(checkpoints.mirror_to, checkpoints.mirror_tiers, config.tracking.run_name)
