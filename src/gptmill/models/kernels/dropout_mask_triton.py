"""Triton kernel that draws a dropout mask: eight elements per call of the random number generator.

Philox (Salmon et al. 2011) is counter-based: a call maps (seed, counter) to four 32-bit words without any state, so
that every thread draws independently and the mask depends on the seed alone, not on the schedule. Each word holds two
16-bit draws; an element is kept if its draw is at least p * 2^16. Eight elements per call instead of four halve the
arithmetic, ten rounds of Philox per call, which limits this kernel more than its one byte per element does; the price
is that p is rounded to a multiple of 2^-16.

A boolean is one byte. Four decisions are packed into a 32-bit word and stored at once; the two words of a call go to
the first and to the second half of the mask, so that neighbouring threads write neighbouring words in both stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
ELEMENTS_PER_CALL = 8
STEPS = 2**16  # of the probability


@triton.jit
def dropout_mask_kernel(mask_ptr, seed_ptr, calls, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """`mask_ptr` points to 32-bit words of four elements each, two for every call of the generator."""
    call = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second, third, fourth = tl.randint4x(tl.load(seed_ptr), call)
    tl.store(mask_ptr + call, _pack_kept(first, second, LIMIT), mask=call < calls)
    tl.store(mask_ptr + calls + call, _pack_kept(third, fourth, LIMIT), mask=call < calls)


@triton.jit
def _pack_kept(one, other, LIMIT: tl.constexpr):
    word = ((one & 0xFFFF) >= LIMIT).to(tl.int32)
    word |= (((one >> 16) & 0xFFFF) >= LIMIT).to(tl.int32) << 8
    word |= ((other & 0xFFFF) >= LIMIT).to(tl.int32) << 16
    word |= (((other >> 16) & 0xFFFF) >= LIMIT).to(tl.int32) << 24
    return word


def run_dropout_mask(size: int, p: float, seed: Tensor) -> Tensor:
    """A mask of `size` booleans; `seed` is a scalar on the device."""
    calls = triton.cdiv(size, ELEMENTS_PER_CALL)
    mask = torch.empty(calls * ELEMENTS_PER_CALL, dtype=torch.bool, device=seed.device)
    grid = (triton.cdiv(calls, BLOCK),)
    dropout_mask_kernel[grid](mask.view(torch.int32), seed, calls, LIMIT=round(p * STEPS), BLOCK=BLOCK, num_warps=4)
    return mask[:size]
