"""Histograms of weights and gradients, counted on the device and copied to the host asynchronously.

Taken on the main rank alone, since DDP keeps weights and gradients equal on all ranks; or, where they are sharded, on
all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptmill.models.kernels.support import has_kernels
from gptmill.runs.events import HistogramsTaken
from gptmill.runs.histogram_buckets import LEVELS, MIN_EXPONENT, NUM_BUCKETS, PER_OCTAVE
from gptmill.runtime.host_memory import send_to_host
from gptmill.runtime.parallel.local_shards import to_local
from gptmill.runtime.parallel.mesh import SHARD
from gptmill.runtime.world import World

CHUNK = 1 << 22  # values counted at a time, which limits the memory that counting takes
NON_FINITE = NUM_BUCKETS  # an extra bucket that is discarded


@dataclass(frozen=True)
class Histograms:
    """Counts of a step, still being copied from the device. Read them only after the device has reached this point."""

    counts: Tensor
    weights: list[str]
    """The names of the first rows."""
    gradients: list[str]
    """The names of the remaining rows."""

    def read(self, step: int) -> HistogramsTaken:
        rows = self.counts.tolist()
        split = len(self.weights)
        return HistogramsTaken(
            step,
            weights=dict(zip(self.weights, rows[:split], strict=True)),
            gradients=dict(zip(self.gradients, rows[split:], strict=True)),
        )


def count_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Counts every parameter's gradient; call it before clipping, which changes them."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: count_buckets(to_local(gradient)) for name, gradient in gradients.items() if gradient is not None}


def share_counts(counts: dict[str, Tensor], model: nn.Module, world: World) -> dict[str, Tensor]:
    """The counts of all trainable parameters, of which each rank has counted some."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    zeros = torch.zeros(NUM_BUCKETS, dtype=torch.int64, device=world.device)
    shared = world.all_reduce_sum(torch.stack([counts.get(name, zeros) for name in names]))
    return dict(zip(names, shared, strict=True))


def count_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: count_buckets(to_local(parameter)) for name, parameter in model.named_parameters()}


def send_histograms(weights: dict[str, Tensor], gradients: dict[str, Tensor], world: World) -> Histograms:
    """Adds up the counts of all parts of a parameter, and starts one copy of all to the host."""
    counts = world.all_reduce_sum(torch.stack([*weights.values(), *gradients.values()]), SHARD)
    return Histograms(send_to_host(counts), list(weights), list(gradients))


@torch.no_grad()
def count_buckets(tensor: Tensor) -> Tensor:
    """Returns how many values are in each bucket, without a host synchronisation; non-finite ones are left out."""
    if has_kernels(tensor.device):
        from gptmill.models.kernels.bucket_count_triton import run_count_buckets  # Triton is not installed everywhere

        return run_count_buckets(tensor.detach(), MIN_EXPONENT, PER_OCTAVE, LEVELS)
    counts = torch.zeros(NUM_BUCKETS + 1, dtype=torch.int64, device=tensor.device)
    for chunk in tensor.detach().flatten().split(CHUNK):
        counts += _count(_find_buckets(chunk.float()))
    return counts[:NUM_BUCKETS]


def _find_buckets(values: Tensor) -> Tensor:
    level = ((values.abs().log2() - MIN_EXPONENT) * PER_OCTAVE).floor() + 1
    bucket = level.clamp(0, LEVELS) * values.sign() + LEVELS
    return torch.where(values.isfinite(), bucket, NON_FINITE).to(torch.int32)


def _count(buckets: Tensor) -> Tensor:
    if buckets.device.type == "cuda":
        # bincount would read the largest value on the host first. Integers, unlike floats, count deterministically.
        return torch.histc(buckets, bins=NUM_BUCKETS + 1, min=0, max=NUM_BUCKETS)
    return torch.bincount(buckets, minlength=NUM_BUCKETS + 1)
