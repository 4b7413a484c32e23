"""Saves checkpoints in the background, on rank 0: makes space, writes, links tiers and offers them to the mirror."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints.background_save import BackgroundSaver, Save, describe_error
from gptmill.runs.checkpoints.content import Checkpoint, Held
from gptmill.runs.checkpoints.disk_space import (
    MARGIN_BYTES,
    deletable_bytes,
    delete_oldest_rolling,
    format_bytes,
    free_bytes,
)
from gptmill.runs.checkpoints.joint_save import JointSave, Writers
from gptmill.runs.checkpoints.storage import measure_checkpoint, read_step, remove_leftovers, save_checkpoint
from gptmill.runs.checkpoints.tiers import LATEST, link_tiers, read_tiers
from gptmill.runs.events import CheckpointSaved, Event

FULL = (errno.ENOSPC, errno.EDQUOT)


class Mirror(Protocol):
    """Copies finished checkpoints to remote storage."""

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None: ...

    def is_using(self, path: Path) -> bool: ...

    def collect(self) -> list[Event]: ...


class CheckpointWriter(BackgroundSaver):
    """Writes one checkpoint at a time, alone or together with other ranks, and links its tiers."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, mirror: Mirror | None = None, writers: Writers | None = None
    ) -> None:
        super().__init__(in_background=config.save_in_background)
        self._folder = folder
        self._keep = config.keep_checkpoints
        self._mirror = mirror
        self._writers = writers
        self._is_paused = False
        remove_leftovers(folder)

    def collect(self) -> list[Event]:
        return super().collect() + (self._mirror.collect() if self._mirror is not None else [])

    def _join(self, checkpoint: Checkpoint[Held]) -> JointSave | None:
        return None if self._writers is None else JointSave(self._folder, self._writers, checkpoint, self._saves)

    def _name_tiers(self, tiers: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([LATEST, *tiers]))

    def _attempt(self, save: Save) -> bool:
        """Saves and links, deleting old checkpoints if the disk is full; returns False if that is not enough."""
        size = measure_checkpoint(save.checkpoint) if self._writers is None else self._writers.total_bytes
        needed = size + MARGIN_BYTES
        has_space = save.info is not None or (save.joint is not None and save.joint.is_open)
        while not has_space and free_bytes(self._folder) < needed:
            # Delete nothing unless that frees enough.
            is_enough = free_bytes(self._folder) + deletable_bytes(self._folder, self._is_used) >= needed
            if not (is_enough and self._delete_oldest(save.step)):
                return self._pause(save, needed)
        while True:
            try:
                if save.info is None:
                    if save.joint is None:
                        save.info = save_checkpoint(self._folder, save.checkpoint)
                    else:
                        save.info = save.joint.complete()
                    self._is_durable = True
                link_tiers(self._folder, save.info.path, save.tiers, self._keep, in_use=self._is_used)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not self._delete_oldest(save.step):
                    if save.info is not None:
                        raise  # it is durable and `find_unlinked` finds it; only its links are missing
                    return self._pause(save, needed)
            else:
                return True

    def _give_up(self, save: Save, reason: str) -> None:
        if save.info is not None:
            self._warn(save.step, "save", f"step {save.step} is saved, but no tier links to it: {reason}")
            return
        if save.joint is not None:
            save.joint.abandon()
        super()._give_up(save, reason)

    def _delete_oldest(self, step: int) -> bool:
        deleted = delete_oldest_rolling(self._folder, in_use=self._is_used)
        if deleted is not None:
            self._warn(step, "disk", f"the disk is full: deleted {deleted.name} to free space for step {step}")
        return deleted is not None

    def _pause(self, save: Save, needed: int) -> bool:
        self._is_paused = True
        if save.joint is not None:
            save.joint.abandon()
        latest = read_tiers(self._folder).get(LATEST)
        last = "there is no checkpoint yet" if latest is None else f"the last checkpoint is step {read_step(latest)}"
        self._warn(
            save.step,
            "disk",
            f"THE DISK IS FULL: {format_bytes(free_bytes(self._folder))} free, a checkpoint and a margin need "
            f"{format_bytes(needed)}; saving is paused, training continues; {last}; free disk space in {self._folder}",
        )
        return False

    def _report(self, save: Save, failures: int) -> None:
        assert save.info is not None
        if failures:
            self._warn(save.step, "save", f"step {save.step} is saved after {failures + 1} attempts")
        if self._is_paused:
            self._is_paused = False
            self._warn(save.step, "disk", f"saving has resumed: step {save.step} is saved")
        info, seconds = save.info, self.last_seconds
        self._record(
            CheckpointSaved(save.step, str(info.path), info.size_bytes, seconds, save.stalled_seconds, save.tiers)
        )
        if self._mirror is not None:
            try:
                self._mirror.offer(info.path, save.tiers, save.step)
            except Exception as error:
                self._warn(save.step, "copy", f"step {save.step} is not mirrored: {describe_error(error)}")

    def _is_used(self, path: Path) -> bool:
        return self._mirror is not None and self._mirror.is_using(path)


class ShardWriter(BackgroundSaver):
    """Writes the shards of a rank other than 0 into the checkpoints that rank 0 completes."""

    def __init__(self, folder: Path, config: CheckpointConfig, writers: Writers) -> None:
        super().__init__(in_background=config.save_in_background)
        self._folder = folder
        self._writers = writers

    def _join(self, checkpoint: Checkpoint[Held]) -> JointSave:
        return JointSave(self._folder, self._writers, checkpoint, self._saves)

    def _attempt(self, save: Save) -> bool:
        assert save.joint is not None
        save.joint.contribute()
        self._is_durable = True  # as far as this rank can know
        return True

    def _report(self, save: Save, failures: int) -> None:
        if failures:
            self._warn(save.step, "save", f"the shards of step {save.step} are saved after {failures + 1} attempts")

    def _give_up(self, save: Save, reason: str) -> None:
        assert save.joint is not None
        save.joint.report_failure(reason)
        super()._give_up(save, reason)
