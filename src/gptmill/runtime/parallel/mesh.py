"""The mesh of a run: its ranks along the axes replicate and shard."""

from __future__ import annotations

import os
from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh

from gptmill.config.errors import UserError
from gptmill.config.run import ParallelName
from gptmill.runtime.world import World

REPLICATE, SHARD = "replicate", "shard"


def arrange_ranks(world: World, strategy: ParallelName) -> World:
    """The world with the mesh that a strategy needs. All ranks call it together."""
    assert strategy != "auto", "choose a strategy before"
    if not world.is_distributed:
        return world  # one process without torchrun: every strategy is the plain path
    axes: dict[str, int] = {}
    if strategy == "fsdp":
        axes = {SHARD: world.size}
    elif strategy == "hsdp":
        shards = find_shards(world.size)
        axes = {REPLICATE: world.size // shards, SHARD: shards}
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
    return replace(world, mesh=mesh, strategy=strategy)


def find_shards(world_size: int) -> int:
    """How many ranks share a copy of the model with hsdp: those of a machine; raises UserError if machines differ."""
    local = read_local_size(world_size)
    if world_size % local:
        raise UserError(
            f"parallel = hsdp shards within each machine, but {world_size} ranks are not a multiple of the {local} on "
            f"this one; start the same number on every machine, or use --parallel fsdp"
        )
    return local


def read_local_size(world_size: int) -> int:
    """How many ranks this machine has, by torchrun; all of them if it does not say."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() and int(value) else world_size
