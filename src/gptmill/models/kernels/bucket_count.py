"""Counts a tensor's values in exponential buckets: the histograms of weights and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmill.models.kernels.support import has_kernels

CHUNK = 1 << 22  # values counted at a time, which limits the memory that counting takes


def count_buckets(values: Tensor, min_exponent: int, per_octave: int, levels: int) -> Tensor:
    """Returns how many values are in each of 2 * levels + 1 buckets, without a host synchronisation.

    The one in the middle has magnitudes below 2^min_exponent, and each octave above that `per_octave` of them on both
    sides. Values that are not finite are left out.
    """
    if not has_kernels(values.device):
        return count_buckets_reference(values, min_exponent, per_octave, levels)
    from gptmill.models.kernels.bucket_count_triton import run_count_buckets

    return run_count_buckets(values, min_exponent, per_octave, levels)


def count_buckets_reference(values: Tensor, min_exponent: int, per_octave: int, levels: int) -> Tensor:
    columns = 2 * levels + 2  # one more for what is not finite
    counts = torch.zeros(columns, dtype=torch.int64, device=values.device)
    for chunk in values.flatten().split(CHUNK):
        counts += _count(_find_buckets(chunk.float(), min_exponent, per_octave, levels), columns)
    return counts[:-1]


def _find_buckets(values: Tensor, min_exponent: int, per_octave: int, levels: int) -> Tensor:
    level = ((values.abs().log2() - min_exponent) * per_octave).floor() + 1
    bucket = level.clamp(0, levels) * values.sign() + levels
    return torch.where(values.isfinite(), bucket, 2 * levels + 1).to(torch.int32)


def _count(buckets: Tensor, columns: int) -> Tensor:
    if buckets.device.type == "cuda":
        # bincount would read the largest value on the host first. Integers, unlike floats, count deterministically.
        return torch.histc(buckets, bins=columns, min=0, max=columns - 1)
    return torch.bincount(buckets, minlength=columns)
