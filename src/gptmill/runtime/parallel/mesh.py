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
    if strategy == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=(SHARD,))
    elif strategy == "hsdp":
        shards = read_local_size(world.size)
        mesh = init_device_mesh(world.device.type, (world.size // shards, shards), mesh_dim_names=(REPLICATE, SHARD))
    else:
        mesh = None
    return replace(world, mesh=mesh, strategy=strategy)


def read_local_size(world_size: int) -> int:
    """How many ranks each machine has, by torchrun; raises UserError if machines have different numbers."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(value) if value.isdecimal() and int(value) else world_size
    if world_size % local:
        raise UserError(
            f"parallel = hsdp shards within each machine, but {world_size} ranks are not a multiple of the {local} on "
            f"this one; start the same number on every machine, or use --parallel fsdp"
        )
    return local
