"""Triton kernels of greedy decoding's last part: the likeliest token of each text, and the move to the next position.

A row of logits is too long for one program: PARTS of them each find the best of their part, and a second kernel the
best of those, which it writes where the next step reads it. As separate operations these are six kernels.

Shape suffixes: B texts, S steps, V vocabulary, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 32


@triton.jit
def find_best_kernel(
    logits_ptr, row_stride, best_ptr, place_ptr, vocab_size, part_size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    tokens = part * part_size + columns
    is_inside = (columns < part_size) & (tokens < vocab_size)
    pointers = logits_ptr + row.to(tl.int64) * row_stride + tokens
    logits = tl.load(pointers, mask=is_inside, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits != logits, 0.0, logits)  # NaN, of a model that has diverged
    best = tl.max(logits, axis=0)
    tl.store(best_ptr + row * PARTS + part, best)
    tl.store(place_ptr + row * PARTS + part, tl.min(tl.where(logits == best, tokens, vocab_size), axis=0))


@triton.jit
def take_best_kernel(
    best_ptr, place_ptr, step_ptr, tokens_ptr, positions_ptr, sampled_ptr, num_steps, vocab_size, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    parts = row * PARTS + tl.arange(0, PARTS)
    best = tl.load(best_ptr + parts)
    places = tl.load(place_ptr + parts)
    token = tl.min(tl.where(best == tl.max(best, axis=0), places, vocab_size), axis=0).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    tl.store(sampled_ptr + row * num_steps + tl.load(step_ptr), token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)


def run_greedy(logits_BV: Tensor, step_1: Tensor, tokens_B: Tensor, positions_B: Tensor, sampled_BS: Tensor) -> None:
    rows, vocab_size = logits_BV.shape
    best_BP = torch.empty(rows, PARTS, device=logits_BV.device)
    place_BP = torch.empty(rows, PARTS, device=logits_BV.device, dtype=torch.int32)
    part_size = triton.cdiv(vocab_size, PARTS)
    find_best_kernel[(rows, PARTS)](
        logits_BV, logits_BV.stride(0), best_BP, place_BP, vocab_size, part_size,
        PARTS=PARTS, BLOCK=triton.next_power_of_2(part_size), num_warps=4,
    )  # fmt: skip
    take_best_kernel[(rows,)](
        best_BP, place_BP, step_1, tokens_B, positions_B, sampled_BS, sampled_BS.shape[1], vocab_size,
        PARTS=PARTS, num_warps=1,
    )  # fmt: skip
