"""MatrixExchange: rows of matrices that all ranks hold become whole matrices that one rank each holds, and back.

B: this rank's matrices, all of one shape; R, C: their rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class MatrixExchange:
    """Sends rows along the last axis of a mesh. Owners alternate from one exchange to the next."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group(mesh.ndim - 1)
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._first_owner = 0

    def gather(self, parts: Sequence[Tensor], num_rows: int) -> Tensor:
        """This rank's matrices, whole, of which `parts` are its rows of all matrices."""
        columns, rows = parts[0].shape[1], self._divide(num_rows)
        self._owned = [
            [place for place in range(len(parts)) if (self._first_owner + place) % self._size == owner]
            for owner in range(self._size)
        ]
        self._first_owner = (self._first_owner + len(parts)) % self._size
        count = len(self._owned[self._rank])
        sent = [torch.stack([parts[place] for place in places]) if places else parts[0][:0] for places in self._owned]
        received = self._send(sent, [count * size * columns for size in rows])
        shapes = zip(received, rows, strict=True)
        return torch.cat([part.view(count, size, columns) for part, size in shapes], dim=1)

    def scatter(self, whole_BRC: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of all matrices, given its own whole ones; the owners are those of the last `gather`."""
        num_rows, columns = like[0].shape
        parts_BRC = whole_BRC.split(self._divide(whole_BRC.shape[1]), dim=1)
        received = self._send(list(parts_BRC), [len(places) * num_rows * columns for places in self._owned])
        parts: dict[int, Tensor] = {}
        for places, part in zip(self._owned, received, strict=True):
            parts |= zip(places, part.view(len(places), num_rows, columns), strict=True)
        return [parts[place] for place in range(len(like))]

    def _divide(self, num_rows: int) -> list[int]:
        """The rows of each rank: as torch.chunk does it, the last ones may have fewer or none."""
        share = -(-num_rows // self._size)
        return [max(0, min(share, num_rows - rank * share)) for rank in range(self._size)]

    def _send(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """Sends one part to each rank, and returns those that they sent, of these sizes."""
        if self._size == 1:
            return [part.reshape(-1) for part in parts]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=self._group)
        return list(received.split(sizes))
