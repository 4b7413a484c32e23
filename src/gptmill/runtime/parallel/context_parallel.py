"""Context parallelism: every rank computes some positions of each window.

A window is cut into twice as many chunks as there are ranks; a rank gets one from each end, so that causal attention
is equally much work for all of them. Keys and values are all-gathered in every layer (as in Llama 3, Grattafiori et
al. 2024, section 3.3.2), and their gradients reduce-scattered: simple and exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.runtime.parallel.collectives import all_gather, reduce_scatter, sum_over_ranks


@dataclass(frozen=True)
class RankRows:
    """The positions of a row that a rank of the group computes, and how it gets the others'."""

    group: dist.ProcessGroup

    def list_positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of this rank in a row of that length."""
        chunk = self._find_chunk(length)
        return torch.cat([torch.arange(end - chunk, end, device=device) for end in self.list_ends(length)])

    def list_ends(self, length: int) -> list[int]:
        """One past the last position of this rank's two chunks."""
        rank, size, chunk = self.group.rank(), self.group.size(), self._find_chunk(length)
        return [(rank + 1) * chunk, (2 * size - rank) * chunk]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All positions along `dim`, in their order; gradients are summed on the rank that owns the position."""
        return _GatherRows.apply(part, dim, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; each gets the gradient of its own summand."""
        return sum_over_ranks(x, self.group)

    def _find_chunk(self, length: int) -> int:
        chunk, rest = divmod(length, 2 * self.group.size())
        assert not rest, f"{length} positions cannot be cut into {2 * self.group.size()} chunks"
        return chunk


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        firsts, lasts = zip(*(share.chunk(2, dim) for share in all_gather(part, group).unbind()), strict=True)
        return torch.cat([*firsts, *reversed(lasts)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size, dim = ctx.group.size(), ctx.dim
        chunks = grad.chunk(2 * size, dim)
        shares = [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(size)]
        return reduce_scatter(torch.stack(shares), ctx.group), None, None
