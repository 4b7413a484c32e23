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
def draw_kernel(keep_ptr, seed_ptr, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    turn = program * BLOCK + tl.arange(0, BLOCK)
    place = keep_ptr + program * (BLOCK * 8) + tl.arange(0, BLOCK)
    left = count - program * (BLOCK * 8) - tl.arange(0, BLOCK)  # numbers from here on
    first, second, third, fourth = tl.randint4x(tl.load(seed_ptr), turn)
    _store(place, left, first, LIMIT, BLOCK)
    _store(place + BLOCK * 2, left - BLOCK * 2, second, LIMIT, BLOCK)
    _store(place + BLOCK * 4, left - BLOCK * 4, third, LIMIT, BLOCK)
    _store(place + BLOCK * 6, left - BLOCK * 6, fourth, LIMIT, BLOCK)


@triton.jit
def _store(place, left, drawn, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    low, high = drawn & 0xFFFF, (drawn >> 16) & 0xFFFF
    tl.store(place, (low >= LIMIT).to(tl.uint8), mask=left > 0)
    tl.store(place + BLOCK, (high >= LIMIT).to(tl.uint8), mask=left > BLOCK)


def run_draw(keep: Tensor, p: float, seed: Tensor) -> None:
    """Fills a tensor of truth values; `seed` is a number on the device."""
    grid = (triton.cdiv(keep.numel(), BLOCK * EACH),)
    draw_kernel[grid](keep.view(torch.uint8), seed, keep.numel(), LIMIT=round(p * STEPS), BLOCK=BLOCK, num_warps=4)
