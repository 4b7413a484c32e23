"""Makes a model that several ranks train together. Called once, before the optimizer is built."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptmill.runtime.parallel.mesh import find_gradient_group
from gptmill.runtime.world import World


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """What a training step calls in the place of the model: the model itself on one rank without a process group."""
    if not world.is_distributed:
        return model
    group = find_gradient_group(world)
    if group is not None and group.size() == 1:
        return model  # the ranks share every layer, and each of them has the whole batch
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=group)
