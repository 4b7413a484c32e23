"""Checkpointing: when a checkpoint is due, saving it in the background, and finding a state to roll back to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.append_file import Extent
from gptmill.runs.checkpoints.background_save import BackgroundSaver
from gptmill.runs.checkpoints.background_writer import CheckpointWriter, ShardWriter
from gptmill.runs.checkpoints.content import Checkpoint, Held
from gptmill.runs.checkpoints.joint_save import Writers
from gptmill.runs.checkpoints.mirror import Mirror
from gptmill.runs.checkpoints.sharded_state import Saved, drop_whole, keep_whole
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint, read_info, read_step
from gptmill.runs.checkpoints.tiers import BEST, make_epoch_name, make_milestone_name, make_rolling_name
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_checkpoint, broadcast_json, complete_snapshot
from gptmill.training.joint_reading import open_jointly
from gptmill.training.plan import TrainPlan
from gptmill.training.snapshots import Snapshot, SnapshotBuffers
from gptmill.training.state import TrainState

GROUPS = ("model", "optimizer", "ema")
PATIENCE_SECONDS = 20.0  # how long a rank that fails waits for the others to save what was started
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
    """Takes snapshots and saves them in the background.

    Rank 0 alone, the others only tracking what was saved; or, where ranks hold shards, all ranks together.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        origin: dict[str, Any],
        world: World,
        step: int,
        writers: Writers | None = None,
    ) -> None:
        self.saved_at = step
        """The last step that was saved."""
        self._branched_at, self._branched_time = step, time.time()
        self._run, self._origin, self._world = run, origin, world
        self.is_joint = writers is not None
        """Whether all ranks save together, each its shards."""
        self._can_roll_back = config.guard.guard == "rollback"
        self._snapshots = SnapshotBuffers(world.device, 2 if self._can_roll_back else 1)
        self._being_written: Snapshot | None = None
        self._waiting: Snapshot | None = None  # a best model, until the writer is free
        self._mirror = _build_mirror(run, config) if world.is_main else None
        self._writer: BackgroundSaver | None = None
        if world.is_main:
            self._writer = CheckpointWriter(run.checkpoints, config.checkpoints, self._mirror, writers)
        elif writers is not None:
            self._writer = ShardWriter(run.checkpoints, config.checkpoints, writers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finishes the current save if training fails, but not if the user interrupts it."""
        if kind is not None and issubclass(kind, Exception):
            self.finish(lambda: None, PATIENCE_SECONDS)

    @property
    def write_seconds(self) -> float:
        """How long the last checkpoint took to become durable."""
        return self._writer.last_seconds if self._writer else 0.0

    def take_snapshot(self, state: TrainState) -> None:
        """Copies the state to host memory for a later rollback, unless all buffers are still to be written to disk."""
        if self._writer is not None and self._can_roll_back:
            self._take(state, {"tiers": []})

    def save(self, state: TrainState, tiers: list[str], beat: Beat, logs: Mapping[str, Extent] | None = None) -> None:
        """Starts a background save; returns as soon as the copy off the device has been enqueued.

        The checkpoint records the present extents of `logs`, so that a resume notices damage to them.
        It waits for the save before, but not with a best model alone: that waits in host memory, and a newer best model
        takes its place. So a loss that falls faster than the disk writes does not hold up training.
        """
        self.saved_at = state.step
        if self._writer is None:
            return
        started = time.monotonic()
        recorded = {"tiers": tiers, "logs": {"time": time.time(), **(logs or {})}}
        if BEST in tiers:
            self._drop_waiting()
        may_wait = tiers == [BEST] and self._writer.is_busy and not self.is_joint
        if may_wait and (waiting := self._take(state, recorded)) is not None:
            self._waiting = waiting
            return
        self._start_waiting(beat)
        snapshot = self._take(state, recorded)
        if snapshot is None:
            self._writer.finish(beat)
            snapshot = self._take(state, recorded)
        assert snapshot is not None
        self._write(snapshot, tiers, time.monotonic() - started, beat)

    def collect(self) -> list[Event]:
        """Events about saves since the last call; also starts the save of a best model that had to wait."""
        if self._writer is None:
            return []
        if not self._writer.is_busy:
            self._start_waiting(lambda: None)
        return self._writer.collect()

    def finish(self, beat: Beat, patience_seconds: float | None = None) -> bool:
        """Waits for the current save and its mirroring; returns whether the last checkpoint is durable."""
        self._start_waiting(beat)
        is_durable = self._writer.finish(beat, patience_seconds) if self._writer else True
        if self._mirror is not None:
            self._mirror.finish(MIRROR_SECONDS, beat)
        return is_durable

    def roll_back(self, step: int) -> None:
        """Marks later checkpoints on disk as abandoned: the run continues from `step` on another trajectory."""
        self.saved_at = min(self.saved_at, step)
        if self._waiting is not None and self._waiting.checkpoint.step > step:
            self._drop_waiting()
        self._branched_at, self._branched_time = step, time.time()

    def find_older(self, last_step: int) -> Checkpoint[Saved] | None:
        """The newest state at or before `last_step`: a snapshot in memory, else a valid checkpoint on disk.

        All ranks call it together.
        """
        if self.is_joint:
            return self._find_older_jointly(last_step)
        found: Checkpoint[Tensor] | None = None
        if self._world.is_main:
            steps = self._snapshots.drop_later(last_step)
            snapshot = self._snapshots.find(steps[-1]) if steps else None
            found = self._load_older(last_step) if snapshot is None else keep_whole(snapshot)
        return broadcast_checkpoint(found, self._world)

    def _find_older_jointly(self, last_step: int) -> Checkpoint[Saved] | None:
        """Ranks may have taken different snapshots: one that is still writing skips the next."""
        steps = self._snapshots.drop_later(last_step)
        for step in reversed(broadcast_json(steps, self._world)):
            snapshot = self._snapshots.find(step)
            if not self._world.any_rank(snapshot is None):
                assert snapshot is not None
                return complete_snapshot(snapshot, self._world)
        older = [str(path) for path in self._list_older(last_step)] if self._world.is_main else []
        for path in map(Path, broadcast_json(older, self._world)):
            with suppress(UserError):
                return open_jointly(path, GROUPS, self._world)
        return None

    def _load_older(self, last_step: int) -> Checkpoint[Tensor] | None:
        for path in self._list_older(last_step):
            with suppress(UserError):
                return load_checkpoint(path, GROUPS)
        return None

    def _list_older(self, last_step: int) -> Iterator[Path]:
        """The checkpoints on disk at or before a step that are on the way to the present state, the newest first."""
        for path in reversed(list_step_folders(self._run.checkpoints)):
            if read_step(path) <= last_step:
                with suppress(UserError):
                    if read_step(path) <= self._branched_at or read_info(path).saved_at > self._branched_time:
                        yield path

    def _take(self, state: TrainState, recorded: dict[str, Any]) -> Snapshot | None:
        """A snapshot; None if all buffers hold what is still to be written."""
        is_busy = self._writer is not None and self._writer.is_busy
        held = [self._being_written if is_busy else None, self._waiting]
        live = self._choose_own(state.make_checkpoint({**self._origin, **recorded}))
        return self._snapshots.take(live, [snapshot for snapshot in held if snapshot is not None])

    def _choose_own(self, checkpoint: Checkpoint[Held]) -> Checkpoint[Held]:
        """What this rank saves; and for a rollback, rank 0 broadcasts what all ranks have."""
        return checkpoint if self._world.is_main else drop_whole(checkpoint)

    def _write(self, snapshot: Snapshot, tiers: list[str], stalled_seconds: float, beat: Beat) -> None:
        assert self._writer is not None
        self._being_written = snapshot

        def wait_for_copy() -> float:
            snapshot.arrived.wait()
            return stalled_seconds + snapshot.arrived.seconds_after(snapshot.started)

        self._writer.start(snapshot.checkpoint, tiers, wait_for_copy, beat)

    def _start_waiting(self, beat: Beat) -> None:
        snapshot, self._waiting = self._waiting, None
        if snapshot is not None:
            self._write(snapshot, [BEST], 0.0, beat)

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._snapshots.drop(self._waiting)
            self._waiting = None


def _build_mirror(run: RunDirectory, config: RunConfig) -> Mirror | None:
    checkpoints = config.checkpoints
    if checkpoints.mirror_to is None:
        return None
    assert config.tracking.run_name is not None
    return Mirror(checkpoints.mirror_to, checkpoints.mirror_tiers, config.tracking.run_name, run.mirrored)
