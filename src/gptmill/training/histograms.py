"""Histograms of weights and gradients, counted on the device and copied to the host asynchronously.

Taken on the main rank alone, since DDP keeps weights and gradients equal on all ranks; or, where they are sharded, on
all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptmill.models.kernels import bucket_count
from gptmill.runs.events import HistogramsTaken
from gptmill.runs.histogram_buckets import LEVELS, MIN_EXPONENT, NUM_BUCKETS, PER_OCTAVE
from gptmill.runtime.host_memory import send_to_host
from gptmill.runtime.parallel.local_shards import to_local
from gptmill.runtime.parallel.mesh import SHARD
from gptmill.runtime.world import World


@dataclass(frozen=True)
class Histograms:
    """Counts of a step, still being copied from the device. Read them only after the device has reached this point."""

    counts: Tensor
    weights: list[str]
    """The names of the first rows."""
    gradients: list[str]
    """The names of the remaining rows."""

    def read(self, step: int) -> HistogramsTaken:
        rows = self.counts.numpy()  # no copy: trackers convert it, in threads of their own
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
    """How many values are in each bucket; those that are not finite are left out."""
    return bucket_count.count_buckets(tensor.detach(), MIN_EXPONENT, PER_OCTAVE, LEVELS)
