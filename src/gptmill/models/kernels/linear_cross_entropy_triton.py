"""Triton kernel of cross-entropy: each row of logits becomes its own gradient, in place, or in fp8 elsewhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 16
BLOCK = 8192
# Exponentials are powers of two here, with one multiplication and sum in one for each number: a card is as short of
# arithmetic in this kernel as it is of memory.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, gradient_ptr, vocab, scale,
    IGNORED: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, gradient_place = logits_ptr + row * vocab, gradient_ptr + row * vocab
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), dtype=tl.float32).to(gradient_ptr.dtype.element_ty)
                tl.store(gradient_place + columns, zeros, mask=columns < vocab)
        return
    # Before the sums, which all threads wait for: later another one may have put the gradient there already.
    logit = tl.load(place + target).to(tl.float32) * LOG2_E
    columns = tl.arange(0, BLOCK)
    x = tl.load(place + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    highest = tl.max(x, axis=0) * LOG2_E
    sums = tl.exp2(x * LOG2_E - highest)
    for start in range(BLOCK, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(place + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        sums += tl.exp2(x * LOG2_E - highest)
    total = tl.sum(sums, axis=0)
    if total == float("inf"):
        # A logit stands far above all of the first block. Once more, with the highest of all blocks so far.
        total = 0.0
        highest = -float("inf")
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(place + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32) * LOG2_E
            higher = tl.maximum(highest, tl.max(x, axis=0))
            total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(x - higher), axis=0)
            highest = higher
    log_total = highest + tl.log2(total)
    tl.store(losses_ptr + row, (log_total - logit) / LOG2_E)
    if WITH_GRADIENT:
        scaled_total = log_total - tl.log2(scale)
        last = (vocab - 1) // BLOCK * BLOCK
        for start in range(0, vocab, BLOCK):
            # The second look finds the row in the cache, first of all what was read last.
            columns = last - start + tl.arange(0, BLOCK)
            x = tl.load(place + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_first")
            x = x.to(tl.float32)
            gradient = tl.exp2(x * LOG2_E - scaled_total)
            tl.store(gradient_place + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=columns < vocab)
        tl.debug_barrier()  # before one number of these is replaced
        gradient = (tl.exp2(logit - log_total) - 1.0) * scale
        tl.store(gradient_place + target, gradient.to(gradient_ptr.dtype.element_ty))


def run_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, ignored: int, gradient_NV: Tensor | None, scale: float
) -> Tensor:
    """The losses. The gradient, times a scale, is written where it is wanted, which may be where the logits are."""
    rows, vocab = logits_NV.shape
    losses_N = logits_NV.new_empty(rows, dtype=torch.float32)
    cross_entropy_kernel[(rows,)](
        logits_NV, targets_N, losses_N, logits_NV if gradient_NV is None else gradient_NV, vocab, scale,
        IGNORED=ignored, WITH_GRADIENT=gradient_NV is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses_N
