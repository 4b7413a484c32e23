"""Collectives that autograd can differentiate, over the ranks of one group.

Each pairs a collective of the forward pass with the one that its gradient needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which all ranks hold alike and each uses for its own share of the work: their gradients are summed."""
    return _CopyToRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x on every rank, each of which goes on alike: the gradient passes unchanged."""
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks as a new tensor; torch.compile can trace it."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-any-return]


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
