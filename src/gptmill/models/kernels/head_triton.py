"""Triton kernel of cross-entropy: each row of logits becomes its own gradient, in place, and beside it in fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 16
BLOCK = 8192
NARROW_BLOCK = 4096  # with a second result to write


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, narrow_ptr, vocab, narrow_scale,
    IGNORED: tl.constexpr, WITH_GRADIENT: tl.constexpr, WITH_NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = logits_ptr + row * vocab
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), dtype=tl.float32)
                tl.store(place + columns, zeros.to(logits_ptr.dtype.element_ty), mask=columns < vocab)
                if WITH_NARROW:
                    here = narrow_ptr + row * vocab + columns
                    tl.store(here, zeros.to(narrow_ptr.dtype.element_ty), mask=columns < vocab)
        return
    # Before the sums, which all threads wait for: later another one may have put the gradient there already.
    logit = tl.load(place + target).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    x = tl.load(place + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    highest = tl.max(x, axis=0)
    sums = tl.exp(x - highest)
    for start in range(BLOCK, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(place + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        sums += tl.exp(x - highest)
    total = tl.sum(sums, axis=0)
    if total == float("inf"):
        # A logit stands far above all of the first block. Once more, with the highest of all blocks so far.
        total = 0.0
        highest = -float("inf")
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(place + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, axis=0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
            highest = higher
    log_total = highest + tl.log(total)
    tl.store(losses_ptr + row, log_total - logit)
    if WITH_GRADIENT:
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            # The second look finds the row in the cache.
            x = tl.load(place + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_first")
            x = x.to(tl.float32)
            gradient = tl.exp(x - log_total) - tl.where(columns == target, 1.0, 0.0)
            tl.store(place + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < vocab)
            if WITH_NARROW:
                narrow = (gradient * narrow_scale).to(narrow_ptr.dtype.element_ty)
                tl.store(narrow_ptr + row * vocab + columns, narrow, mask=columns < vocab)


def run_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    ignored: int,
    *,
    with_gradient: bool,
    narrow_NV: Tensor | None = None,
    narrow_scale: float = 1.0,
) -> Tensor:
    """The losses; `narrow_NV` gets the gradients too, times a scale."""
    rows, vocab = logits_NV.shape
    block = BLOCK if narrow_NV is None else NARROW_BLOCK
    losses_N = logits_NV.new_empty(rows, dtype=torch.float32)
    cross_entropy_kernel[(rows,)](
        logits_NV, targets_N, losses_N, narrow_NV, vocab, narrow_scale,
        IGNORED=ignored, WITH_GRADIENT=with_gradient, WITH_NARROW=narrow_NV is not None, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return losses_N
