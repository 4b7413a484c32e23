"""Snapshots: copies of the state in reused host buffers, for saving in the background and for rollbacks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptmill.runs.checkpoints.content import Checkpoint, Held, Shard
from gptmill.runtime.host_memory import HostBuffer
from gptmill.runtime.timing import DeviceTimestamp


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state in host memory, complete once `arrived` has been reached."""

    checkpoint: Checkpoint[Held]
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

    def allocate(self, live: Checkpoint[Held]) -> None:
        """Allocates the buffers, unless they already fit these tensors."""
        tensors = _flatten(live)
        if not (self._buffers and self._buffers[0].fits(tensors)):
            self._taken.clear()
            self._buffers = [HostBuffer(tensors, self._device) for _ in range(self._count)]

    def _find_buffer(self, kept: Collection[Snapshot]) -> HostBuffer | None:
        """The buffer of the next snapshot: a free one, or that of the oldest snapshot that need not be kept."""
        used = [snapshot.buffer for snapshot in self._taken]
        order = [*(buffer for buffer in self._buffers if buffer not in used), *used]
        keeping = [snapshot.buffer for snapshot in kept]
        return next((buffer for buffer in order if buffer not in keeping), None)

    def take(self, live: Checkpoint[Held], kept: Collection[Snapshot] = ()) -> Snapshot | None:
        """Enqueues the copy off the device without waiting for it; None if all buffers have to be kept."""
        self.allocate(live)
        buffer = self._find_buffer(kept)
        if buffer is None:
            return None
        started = DeviceTimestamp(self._device)
        copied = buffer.fill(_flatten(live))
        tensors = {
            group: {name: _replace_local(item, copied[f"{group}/{name}"]) for name, item in named.items()}
            for group, named in live.tensors.items()
        }
        checkpoint = Checkpoint(live.step, tensors, live.values)
        snapshot = Snapshot(checkpoint, started, DeviceTimestamp(self._device), buffer)
        self._taken = [*(older for older in self._taken if older.buffer is not buffer), snapshot]
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Frees its buffer for the next one."""
        self._taken = [taken for taken in self._taken if taken is not snapshot]

    def drop_later(self, last_step: int) -> list[int]:
        """Drops snapshots after a step, which a rollback to it undoes; returns the steps of those that are left."""
        self._taken = [snapshot for snapshot in self._taken if snapshot.checkpoint.step <= last_step]
        return [snapshot.checkpoint.step for snapshot in self._taken]

    def find(self, step: int) -> Checkpoint[Held] | None:
        """The snapshot of a step, complete."""
        for snapshot in self._taken:
            if snapshot.checkpoint.step == step:
                snapshot.arrived.wait()
                return snapshot.checkpoint
        return None


def _flatten(checkpoint: Checkpoint[Held]) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": item.tensor if isinstance(item, Shard) else item
        for group, named in checkpoint.tensors.items()
        for name, item in named.items()
    }


def _replace_local(item: Held, tensor: Tensor) -> Held:
    return replace(item, tensor=tensor) if isinstance(item, Shard) else tensor
