"""Triton kernel of cross-entropy: the loss of each row of logits, and its gradient, in place or in fp8 elsewhere.

One program per token, since a row of V logits is complete in itself. A row is too long for registers, so the program
goes over it twice, in blocks of BLOCK columns:

1. the sum of exponentials, relative to a maximum m so that they do not overflow: logsumexp = m + log(sum exp(x - m)). A
   separate pass for the maximum is not needed: that of the first block serves, as any shift does whose exponentials fit
   fp32. If the sum overflows nevertheless, it is computed again by online softmax (Milakov & Gimelshein 2018), which
   rescales the sum so far whenever a block raises the maximum;
2. the gradient p - one_hot(target), times a scale, which overwrites the logits or goes to an fp8 tensor: p = exp(x -
   logsumexp) for all columns and, after a barrier, p - 1 for the target's. This pass runs from the last block to the
   first: what was read last is most likely still in the cache, and eviction hints help to keep it there. So about half
   of the 2 N V e bytes read come from memory; N V e are written.

Columns that pad the vocabulary are left out of the sum, and their gradient is set to zero at the end. Full blocks are
loaded without a mask and the last one with it: under a mask whose end is no multiple of 16, loads are not vectorised.

Exponentials and logarithms are to base 2, as the hardware has them: exp(x - m) = exp2(x * log2(e) - m * log2(e)) is one
fused multiply-add and one instruction. It matters, since this kernel is limited by arithmetic as much as by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 16
BLOCK = 8192
PADDING_BLOCK = 64
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sum_exponentials(row_ptr, unpadded_vocab, HAS_FULL_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """The first block's maximum, and the sum of all exponentials relative to it, which may overflow."""
    columns = tl.arange(0, BLOCK)
    if HAS_FULL_BLOCK:
        x = tl.load(row_ptr + columns).to(tl.float32)
    else:
        x = tl.load(row_ptr + columns, mask=columns < unpadded_vocab, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, axis=0) * LOG2_E
    sums = tl.exp2(x * LOG2_E - maximum)
    if HAS_FULL_BLOCK:
        end = unpadded_vocab // BLOCK * BLOCK
        for start in range(BLOCK, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + columns, eviction_policy="evict_last").to(tl.float32)
            sums += tl.exp2(x * LOG2_E - maximum)
        columns = end + tl.arange(0, BLOCK)
        rest = tl.load(row_ptr + columns, mask=columns < unpadded_vocab, other=-float("inf"))
        sums += tl.exp2(rest.to(tl.float32) * LOG2_E - maximum)
    return maximum, tl.sum(sums, axis=0)


@triton.jit
def _sum_exponentials_online(row_ptr, vocab, unpadded_vocab, BLOCK: tl.constexpr):
    """The maximum of the row, and the sum relative to it: a block that raises the maximum shrinks the sum so far."""
    total = 0.0
    maximum = -float("inf")
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < unpadded_vocab, other=-float("inf")).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(x - new_maximum), axis=0)
        maximum = new_maximum
    return maximum, total


@triton.jit
def _store_probabilities(row_ptr, gradient_row_ptr, vocab, log_total, scale, BLOCK: tl.constexpr):
    """p times the scale for all columns, from the last block on, which the first pass has left in the cache."""
    scaled_total = log_total - tl.log2(scale)
    last = (vocab - 1) // BLOCK * BLOCK
    for start in range(0, vocab, BLOCK):
        columns = last - start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_first")
        x = x.to(tl.float32)
        gradient = tl.exp2(x * LOG2_E - scaled_total)
        tl.store(gradient_row_ptr + columns, gradient.to(gradient_row_ptr.dtype.element_ty), mask=columns < vocab)


@triton.jit
def _store_zeros(gradient_row_ptr, first, vocab, BLOCK: tl.constexpr):
    """The gradient of the columns from `first` on."""
    for start in range(first, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=tl.float32).to(gradient_row_ptr.dtype.element_ty)
        tl.store(gradient_row_ptr + columns, zeros, mask=columns < vocab)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, gradient_ptr, vocab, unpadded_vocab, scale,
    IGNORE_INDEX: tl.constexpr, WITH_GRADIENT: tl.constexpr, HAS_FULL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PADDING_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, gradient_row_ptr = logits_ptr + row * vocab, gradient_ptr + row * vocab
    target = tl.load(targets_ptr + row)
    if target == IGNORE_INDEX:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENT:
            _store_zeros(gradient_row_ptr, 0, vocab, BLOCK)
        return
    # Loaded before the reductions, at which all threads synchronise: after them, another thread may already have
    # overwritten it with the gradient.
    logit = tl.load(row_ptr + target).to(tl.float32) * LOG2_E
    maximum, total = _sum_exponentials(row_ptr, unpadded_vocab, HAS_FULL_BLOCK, BLOCK)
    if total == float("inf"):  # a logit lies far above the first block's maximum
        maximum, total = _sum_exponentials_online(row_ptr, vocab, unpadded_vocab, BLOCK)
    log_total = maximum + tl.log2(total)
    tl.store(losses_ptr + row, (log_total - logit) / LOG2_E)
    if WITH_GRADIENT:
        _store_probabilities(row_ptr, gradient_row_ptr, vocab, log_total, scale, BLOCK)
        tl.debug_barrier()  # all of the row is stored before the target's element and the padding are replaced
        _store_zeros(gradient_row_ptr, unpadded_vocab, vocab, PADDING_BLOCK)
        gradient = (tl.exp2(logit - log_total) - 1.0) * scale
        tl.store(gradient_row_ptr + target, gradient.to(gradient_ptr.dtype.element_ty))


def run_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    ignore_index: int,
    gradient_NV: Tensor | None,
    scale: float,
    vocab_size: int,
) -> Tensor:
    """Returns the losses, and writes the gradient, times a scale, to `gradient_NV`, which may be `logits_NV` itself.

    The logits from `vocab_size` on are padding.
    """
    rows, vocab = logits_NV.shape
    losses_N = logits_NV.new_empty(rows, dtype=torch.float32)
    cross_entropy_kernel[(rows,)](
        logits_NV, targets_N, losses_N, logits_NV if gradient_NV is None else gradient_NV, vocab,
        vocab_size, scale, IGNORE_INDEX=ignore_index, WITH_GRADIENT=gradient_NV is not None,
        HAS_FULL_BLOCK=vocab_size >= BLOCK, BLOCK=BLOCK, PADDING_BLOCK=PADDING_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses_N
