"""Gradients in the format that they were computed in, added to sums in a wider one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmill.models.kernels.support import has_kernels


def accumulate(totals: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Adds each to its sum, which it has the shape of. PyTorch adds quickly only where formats are the same."""
    if not totals or not has_kernels(totals[0].device):
        accumulate_reference(totals, new)
        return
    from gptmill.models.kernels.accumulate_triton import run_accumulate

    for total, each in zip(totals, new, strict=True):
        run_accumulate(total, each.contiguous())


def accumulate_reference(totals: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """The twin."""
    if totals:
        torch._foreach_add_(list(totals), list(new))
