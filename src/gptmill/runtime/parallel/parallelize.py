"""Makes a model that several ranks train together. Called once, before the optimizer is built."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptmill.runtime.world import World


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """What a training step calls in the place of the model: the model itself on one rank without a process group."""
    if not world.is_distributed:
        return model
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
