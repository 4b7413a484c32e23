"""Triton kernel that draws what dropout keeps: for eight numbers with each turn of the generator, Philox."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
EACH = 8  # numbers for each turn
STEPS = 2**16  # of chance


@triton.jit
def dropout_mask_kernel(keep_ptr, seed_ptr, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """What is kept stands in words of four numbers; `count` is that of the turns, each for two words."""
    turn = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second, third, fourth = tl.randint4x(tl.load(seed_ptr), turn)
    tl.store(keep_ptr + turn, _choose(first, second, LIMIT), mask=turn < count)
    tl.store(keep_ptr + count + turn, _choose(third, fourth, LIMIT), mask=turn < count)


@triton.jit
def _choose(one, other, LIMIT: tl.constexpr):
    word = ((one & 0xFFFF) >= LIMIT).to(tl.int32)
    word |= (((one >> 16) & 0xFFFF) >= LIMIT).to(tl.int32) << 8
    word |= ((other & 0xFFFF) >= LIMIT).to(tl.int32) << 16
    word |= (((other >> 16) & 0xFFFF) >= LIMIT).to(tl.int32) << 24
    return word


def run_dropout_mask(count: int, p: float, seed: Tensor) -> Tensor:
    """So many truth values; `seed` is a number on a device."""
    turns = triton.cdiv(count, EACH)
    keep = torch.empty(turns * EACH, dtype=torch.bool, device=seed.device)
    grid = (triton.cdiv(turns, BLOCK),)
    dropout_mask_kernel[grid](keep.view(torch.int32), seed, turns, LIMIT=round(p * STEPS), BLOCK=BLOCK, num_warps=4)
    return keep[:count]
