"""Triton kernel that counts a tensor's values in exponential buckets: the histograms of weights and gradients.

As separate operations, finding the buckets takes a dozen passes over the tensor. Counting them with atomic additions
is slower still: most values of a tensor share a few buckets, and wait for each other. Here one pass does both. Warps
count by voting, which takes as long whatever the values are, and each program adds its counts to the totals once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
BLOCKS_PER_PROGRAM = 16


@triton.jit
def count_buckets_kernel(
    values_ptr, counts_ptr, num_values, min_exponent, per_octave,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS_PER_PROGRAM * BLOCK
    counts = tl.zeros([COLUMNS], dtype=tl.int32)
    for number in range(BLOCKS_PER_PROGRAM):
        places = first + number * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < num_values, other=float("inf")).to(tl.float32)
        magnitudes = tl.abs(values)
        level = tl.floor((tl.log2(magnitudes) - min_exponent) * per_octave) + 1
        level = tl.minimum(tl.maximum(level, 0.0), 1.0 * LEVELS)
        bucket = tl.where(values < 0, -level, level).to(tl.int32) + LEVELS
        # What is not finite, and what is beyond the end, counts in a column behind the buckets.
        counts += tl.histogram(tl.where(magnitudes < float("inf"), bucket, 2 * LEVELS + 1), COLUMNS)
    tl.atomic_add(counts_ptr + tl.arange(0, COLUMNS), counts.to(tl.int64), sem="relaxed")


def run_count_buckets(values: Tensor, min_exponent: int, per_octave: int, levels: int) -> Tensor:
    """Counts in 2 * levels + 1 buckets; values that are not finite are left out."""
    columns = triton.next_power_of_2(2 * levels + 2)
    counts = torch.zeros(columns, dtype=torch.int64, device=values.device)
    flat = values.reshape(-1)
    count_buckets_kernel[(triton.cdiv(flat.numel(), BLOCK * BLOCKS_PER_PROGRAM),)](
        flat, counts, flat.numel(), float(min_exponent), float(per_octave),
        LEVELS=levels, COLUMNS=columns, BLOCK=BLOCK, BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return counts[: 2 * levels + 1]
