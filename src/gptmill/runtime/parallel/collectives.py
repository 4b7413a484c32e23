"""Collectives that autograd can differentiate, over the ranks of one group.

Each pairs a collective of the forward pass with the one that its gradient needs. The operators are torch's functional
ones, which torch.compile can trace; their wrappers in torch.distributed are renamed from release to release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which all ranks hold alike and each uses for its own share of the work: their gradients are summed."""
    return _CopyToRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x on every rank, each of which goes on alike: the gradient passes unchanged."""
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' last dimension side by side; each rank goes on alike, and gets the gradient of its own columns."""
    return _GatherColumns.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def send_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """As `all_to_all`; the gradient goes the same ways back."""
    return _SendRows.apply(x, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' x, stacked."""
    return _wait(_ops.all_gather_into_tensor(x[None].contiguous(), group.size(), group.group_name))


def reduce_scatter(stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of what each has stacked for this one."""
    summed = _ops.reduce_scatter_tensor(stacked.contiguous(), "sum", group.size(), group.group_name)
    return _wait(summed).squeeze(0)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first `sent[0]` rows to rank 0, the next ones to rank 1…; returns what came from each, in order."""
    return _wait(_ops.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name))


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)  # type: ignore[no-any-return]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        return all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, *ctx.way_back), None, None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return torch.cat(all_gather(x, group).unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None
