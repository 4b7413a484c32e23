"""Triton kernel of `accumulate`: total += new, where the two may differ in dtype.

Each program adds one block of BLOCK consecutive elements. The cast happens in registers, so that an fp32 total and a
bf16 addend cost 4 + 2 bytes read and 4 written per element, the least possible.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def accumulate_kernel(total_ptr, new_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < size
    total = tl.load(total_ptr + offsets, mask=is_inside, other=0.0)
    new = tl.load(new_ptr + offsets, mask=is_inside, other=0.0)
    tl.store(total_ptr + offsets, total + new.to(total.dtype), mask=is_inside)


def run_accumulate(total: Tensor, new: Tensor) -> None:
    size = total.numel()
    accumulate_kernel[(triton.cdiv(size, BLOCK),)](total, new, size, BLOCK=BLOCK, num_warps=WARPS)
