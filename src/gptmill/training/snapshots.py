"""Copies of the run's state in host memory: what a checkpoint is written from, and where a run goes back to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runtime.host_memory import HostCopy
from gptmill.runtime.timing import Moment


@dataclass(frozen=True)
class Snapshot:
    """A state on its way to the host; `arrived` has come once it is complete there."""

    checkpoint: Checkpoint
    began: Moment
    arrived: Moment
    room: HostCopy


class Snapshots:
    """The newest few: a spike may come so soon after one that only the one before is older than its cause."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._count = count
        self._rooms: list[HostCopy] = []
        self._taken: list[Snapshot] = []

    def prepare(self, live: Checkpoint) -> None:
        """Sets the memory aside, which takes a moment: best done as soon as the optimizer has its state."""
        tensors = _flatten(live)
        if not (self._rooms and self._rooms[0].fits(tensors)):
            self._taken.clear()
            self._rooms = [HostCopy(tensors, self._device) for _ in range(self._count)]

    def find_next_room(self) -> HostCopy:
        """The one that the next snapshot goes to: a free one, or that of the oldest."""
        used = [snapshot.room for snapshot in self._taken]
        return next((room for room in self._rooms if room not in used), used[0] if used else self._rooms[0])

    def take(self, live: Checkpoint) -> Snapshot:
        """Copies the state off the device without waiting for it."""
        self.prepare(live)
        room = self.find_next_room()
        began = Moment(self._device)
        copied = room.fill(_flatten(live))
        tensors = {group: {name: copied[f"{group}/{name}"] for name in named} for group, named in live.tensors.items()}
        snapshot = Snapshot(Checkpoint(live.step, tensors, live.values), began, Moment(self._device), room)
        self._taken = [*(older for older in self._taken if older.room is not room), snapshot]
        return snapshot

    def find_newest(self, last_step: int) -> Checkpoint | None:
        """The newest of `last_step` or before, complete on the host; the run goes back, and later ones are let go."""
        self._taken = [snapshot for snapshot in self._taken if snapshot.checkpoint.step <= last_step]
        if not self._taken:
            return None
        self._taken[-1].arrived.wait()
        return self._taken[-1].checkpoint


def _flatten(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for group, named in checkpoint.tensors.items() for name, tensor in named.items()}
