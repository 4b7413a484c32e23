"""Triton kernel of greedy decoding's last part: the likeliest token of each text, and the move to the next position.

One program per text reads its row of logits once. As separate operations these are six kernels.

Shape suffixes: B texts, S steps, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def greedy_kernel(
    logits_ptr, row_stride, step_ptr, tokens_ptr, positions_ptr, sampled_ptr, num_steps, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = columns  # of each lane's best: the first of equal ones
    for start in tl.range(0, vocab_size, BLOCK):
        tokens = start + columns
        pointers = logits_ptr + row.to(tl.int64) * row_stride + tokens
        logits = tl.load(pointers, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
        logits = tl.where(logits != logits, 0.0, logits)  # NaN, of a model that has diverged
        place = tl.where(logits > best, tokens, place)
        best = tl.maximum(best, logits)
    is_best = best == tl.max(best, axis=0)
    token = tl.min(tl.where(is_best, place, vocab_size), axis=0).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    tl.store(sampled_ptr + row * num_steps + tl.load(step_ptr), token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)


def run_greedy(logits_BV: Tensor, step_1: Tensor, tokens_B: Tensor, positions_B: Tensor, sampled_BS: Tensor) -> None:
    """Writes each text's likeliest token in place of its last one and into column `step_1` of `sampled_BS`, and adds
    1 to its position."""
    rows, vocab_size = logits_BV.shape
    greedy_kernel[(rows,)](
        logits_BV, logits_BV.stride(0), step_1, tokens_B, positions_B, sampled_BS, sampled_BS.shape[1], vocab_size,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
