"""Triton kernel that adds numbers of one format to sums in another: one pass at the speed of memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def accumulate_kernel(total_ptr, new_ptr, size, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = here < size
    total = tl.load(total_ptr + here, mask=is_inside, other=0.0)
    new = tl.load(new_ptr + here, mask=is_inside, other=0.0)
    tl.store(total_ptr + here, total + new.to(total.dtype), mask=is_inside)


def run_accumulate(total: Tensor, new: Tensor) -> None:
    size = total.numel()
    accumulate_kernel[(triton.cdiv(size, BLOCK),)](total, new, size, BLOCK=BLOCK, num_warps=WARPS)
