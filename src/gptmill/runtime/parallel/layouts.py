"""Layouts: which rows or columns of a whole tensor each rank of a group holds.

A packed tensor has sections, such as the rows of queries, keys and values. Every rank holds an equal share of each, so
that its share of queries belongs to its share of keys. Files hold whole tensors in their plain order: a layout says
which spans of it a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Span(NamedTuple):
    """Consecutive indices along the split dimension: where they begin in the whole and in the local tensor."""

    whole_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """An equal share of each section along `dim` for every rank of the group, in the order of the ranks."""

    dim: int
    sections: tuple[int, ...]
    """How the dimension of the whole tensor is divided."""
    group: dist.ProcessGroup
    is_saved: bool = True
    """Whether this rank saves its share; False where a rank of another group has the same and saves that."""

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def splits(self, local: Tensor) -> bool:
        """Whether this is a share of a tensor so split, and not one of its scalars, such as a step count."""
        return local.dim() > self.dim and local.shape[self.dim] * self.size == self.whole_length

    @property
    def whole_length(self) -> int:
        """The length of the split dimension in the whole tensor."""
        return sum(self.sections)

    def list_spans(self, rank: int | None = None) -> list[Span]:
        """What a rank holds, by default this one."""
        rank = self.rank if rank is None else rank
        spans, whole_start, local_start = [], 0, 0
        for section in self.sections:
            share = section // self.size
            spans.append(Span(whole_start + rank * share, local_start, share))
            whole_start, local_start = whole_start + section, local_start + share
        return spans

    def take(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A rank's share of a whole tensor, by default this one's, in memory of its own."""
        parts = [whole.narrow(self.dim, span.whole_start, span.length) for span in self.list_spans(rank)]
        return torch.cat(parts, dim=self.dim)

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the shares of all ranks, in their order."""
        shape = list(shares[0].shape)
        shape[self.dim] = self.whole_length
        whole = shares[0].new_empty(shape)
        for rank, share in enumerate(shares):
            for span in self.list_spans(rank):
                part = share.narrow(self.dim, span.local_start, span.length)
                whole.narrow(self.dim, span.whole_start, span.length).copy_(part)
        return whole

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor on every rank of the group; all of them must call it."""
        local = local.detach().contiguous()
        shares = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(shares, local, group=self.group)
        return self.join(shares)


def find_layout(name: str, layouts: Mapping[str, Layout]) -> Layout | None:
    """How a parameter is split, or an optimizer's state PARAMETER/KEY with it; None for one that is whole."""
    return layouts.get(name.partition("/")[0])
