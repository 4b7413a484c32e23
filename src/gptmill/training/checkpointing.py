"""Checkpointing: when a checkpoint is due, snapshots of the state in host memory, and saving them in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.checkpoints.background_writer import CheckpointWriter
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.mirror import Mirror
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint, read_info, read_step
from gptmill.runs.checkpoints.tiers import BEST, make_epoch_name, make_milestone_name, make_rolling_name
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event
from gptmill.runtime.host_memory import HostBuffer
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.world import World
from gptmill.training.gathered_checkpoint import gather_checkpoint
from gptmill.training.plan import TrainPlan
from gptmill.training.state import TrainState

GROUPS = ("model", "optimizer", "ema")
MIRROR_SECONDS = 600.0  # how long a run waits at its end for the last checkpoint to be mirrored

Beat = Callable[[], None]


def list_due_tiers(state: TrainState, config: RunConfig, plan: TrainPlan, *, is_best: bool, is_last: bool) -> list[str]:
    """The tiers that the current step is saved for. An epoch shorter than `checkpoint_freq` gets no epoch tier."""
    step, checkpoints = state.step, config.checkpoints
    epochs = state.windows_read // plan.windows_per_epoch
    tiers = [make_rolling_name(step)] if is_last or step % checkpoints.checkpoint_freq == 0 else []
    if checkpoints.milestone_freq is not None and step % checkpoints.milestone_freq == 0:
        tiers.append(make_milestone_name(step))
    if epochs > state.epochs_done and plan.steps_per_epoch >= checkpoints.checkpoint_freq:
        tiers.append(make_epoch_name(epochs))
    return [*tiers, BEST] if is_best else tiers


class Checkpointer:
    """Takes snapshots and saves them in the background, on rank 0; other ranks only track what was saved."""

    def __init__(self, run: RunDirectory, config: RunConfig, origin: dict[str, Any], world: World, step: int) -> None:
        self.saved_at = step
        """The last step that was saved."""
        self._branched_at, self._branched_time = step, time.time()
        self._run, self._origin, self._is_main, self._world = run, origin, world.is_main, world
        self._can_roll_back = config.guard.guard == "rollback"
        self._snapshots = SnapshotBuffers(world.device, 2 if self._can_roll_back else 1)
        self._being_written: Snapshot | None = None
        self._mirror = _build_mirror(config) if world.is_main else None
        self._writer: CheckpointWriter | None = None
        if world.is_main:
            self._writer = CheckpointWriter(run.checkpoints, config.checkpoints, self._mirror)

    @property
    def write_seconds(self) -> float:
        """How long the last checkpoint took to become durable."""
        return self._writer.last_seconds if self._writer else 0.0

    def take_snapshot(self, state: TrainState) -> None:
        """Copies the state to host memory for a later rollback, unless the buffer is still being written to disk."""
        is_busy = self._is_main and self._is_next_buffer_in_use(state)
        # Rank 0 knows whether its buffer is free; where all ranks must help, they learn it from there.
        if self._world.shards_weights and self._can_roll_back:
            is_busy = self._world.any_rank(is_busy)
        if self._can_roll_back and not is_busy:
            self._take(state, [])

    def save(self, state: TrainState, tiers: list[str], beat: Beat) -> None:
        """Starts a background save; returns as soon as the copy off the device has been enqueued."""
        self.saved_at = state.step
        started = time.monotonic()
        if self._writer is None:
            self._take(state, tiers)
            return
        if self._is_next_buffer_in_use(state):
            self._writer.finish(beat)
        snapshot = self._being_written = self._take(state, tiers)
        assert snapshot is not None, "rank 0 has a writer, and takes the snapshots"
        stalled_seconds = time.monotonic() - started

        def wait_for_copy() -> float:
            snapshot.arrived.wait()
            return stalled_seconds + snapshot.arrived.seconds_after(snapshot.started)

        self._writer.start(snapshot.checkpoint, tiers, wait_for_copy, beat)

    def collect(self) -> list[Event]:
        """Events about saves since the last call."""
        return self._writer.collect() if self._writer else []

    def finish(self, beat: Beat) -> bool:
        """Waits for the current save and its mirroring; returns whether the last checkpoint is durable."""
        is_durable = self._writer.finish(beat) if self._writer else True
        if self._mirror is not None:
            self._mirror.finish(MIRROR_SECONDS, beat)
        return is_durable

    def roll_back(self, step: int) -> None:
        """Marks later checkpoints on disk as abandoned: the run continues from `step` on another trajectory."""
        self.saved_at = min(self.saved_at, step)
        self._branched_at, self._branched_time = step, time.time()

    def find_older(self, last_step: int) -> Checkpoint | None:
        """The newest state at or before `last_step`: a snapshot in memory, else a valid checkpoint on disk."""
        if not self._is_main:
            return None
        if (snapshot := self._snapshots.find_newest(last_step)) is not None:
            return snapshot
        for path in reversed(list_step_folders(self._run.checkpoints)):
            if read_step(path) <= last_step:
                with suppress(UserError):
                    is_current = read_step(path) <= self._branched_at or read_info(path).saved_at > self._branched_time
                    if is_current:
                        return load_checkpoint(path, GROUPS)
        return None

    def _take(self, state: TrainState, tiers: list[str]) -> Snapshot | None:
        """A snapshot on rank 0, to which the others send what it does not have."""
        if not (self._is_main or self._world.shards_weights):
            return None
        checkpoint = state.make_checkpoint({**self._origin, "tiers": tiers})
        if self._world.shards_weights:
            checkpoint = gather_checkpoint(checkpoint, self._world, state.layouts)
        return self._snapshots.take(checkpoint) if self._is_main else None

    def _is_next_buffer_in_use(self, state: TrainState) -> bool:
        """Whether a checkpoint is still being written from the host buffer that the next snapshot overwrites."""
        if self._writer is None or self._being_written is None or not self._writer.is_busy:
            return False
        self._snapshots.allocate(state.make_checkpoint({}))
        return self._being_written.buffer is self._snapshots.find_next_buffer()


@contextmanager
def open_checkpointer(
    run: RunDirectory, config: RunConfig, origin: dict[str, Any], world: World, step: int
) -> Iterator[Checkpointer]:
    """Finishes the current save if training fails, but not if the user interrupts it."""
    checkpointer = Checkpointer(run, config, origin, world, step)
    try:
        yield checkpointer
    except Exception:
        checkpointer.finish(lambda: None)
        raise


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state in host memory, complete once `arrived` has been reached."""

    checkpoint: Checkpoint
    started: DeviceTimestamp
    arrived: DeviceTimestamp
    buffer: HostBuffer


class SnapshotBuffers:
    """The newest few snapshots, in reused host buffers.

    A rollback needs two: a spike may follow a snapshot so closely that only the one before predates its cause.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._count = count
        self._buffers: list[HostBuffer] = []
        self._taken: list[Snapshot] = []

    def allocate(self, live: Checkpoint) -> None:
        """Allocates the buffers, unless they already fit these tensors."""
        tensors = _flatten(live)
        if not (self._buffers and self._buffers[0].fits(tensors)):
            self._taken.clear()
            self._buffers = [HostBuffer(tensors, self._device) for _ in range(self._count)]

    def find_next_buffer(self) -> HostBuffer:
        """The buffer of the next snapshot: a free one, or that of the oldest snapshot."""
        used = [snapshot.buffer for snapshot in self._taken]
        return next((buffer for buffer in self._buffers if buffer not in used), used[0] if used else self._buffers[0])

    def take(self, live: Checkpoint) -> Snapshot:
        """Enqueues the copy off the device without waiting for it."""
        self.allocate(live)
        buffer = self.find_next_buffer()
        started = DeviceTimestamp(self._device)
        copied = buffer.fill(_flatten(live))
        tensors = {group: {name: copied[f"{group}/{name}"] for name in named} for group, named in live.tensors.items()}
        checkpoint = Checkpoint(live.step, tensors, live.values)
        snapshot = Snapshot(checkpoint, started, DeviceTimestamp(self._device), buffer)
        self._taken = [*(older for older in self._taken if older.buffer is not buffer), snapshot]
        return snapshot

    def find_newest(self, last_step: int) -> Checkpoint | None:
        """The newest snapshot at or before `last_step`, complete; drops later ones, which a rollback undoes."""
        self._taken = [snapshot for snapshot in self._taken if snapshot.checkpoint.step <= last_step]
        if not self._taken:
            return None
        self._taken[-1].arrived.wait()
        return self._taken[-1].checkpoint


def _flatten(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for group, named in checkpoint.tensors.items() for name, tensor in named.items()}


def _build_mirror(config: RunConfig) -> Mirror | None:
    checkpoints = config.checkpoints
    if checkpoints.mirror_to is None:
        return None
    assert config.tracking.run_name is not None
    return Mirror(checkpoints.mirror_to, checkpoints.mirror_tiers, config.tracking.run_name)
