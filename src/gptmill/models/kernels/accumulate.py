"""Gradient accumulation in mixed precision: adds gradients in bf16 to sums in fp32.

PyTorch's multi-tensor add takes its fast path only where the dtypes of both sides agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmill.models.kernels.support import has_kernels


def accumulate(totals: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Adds each new tensor to its total, in place; the shapes of the two are the same."""
    if not totals or not has_kernels(totals[0].device):
        accumulate_reference(totals, new)
        return
    from gptmill.models.kernels.accumulate_triton import run_accumulate

    for total, each in zip(totals, new, strict=True):
        run_accumulate(total, each.contiguous())


def accumulate_reference(totals: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Reference implementation."""
    if totals:
        torch._foreach_add_(list(totals), list(new))
