"""The mesh of a run: its ranks along the axes replicate and shard, and within these ep, cp and tp."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gptmill.config.errors import UserError
from gptmill.config.run import MachineConfig, ParallelName
from gptmill.runtime.world import CP, EP, TP, World

REPLICATE, SHARD = "replicate", "shard"
FIELDS = {EP: "expert_parallel", CP: "context_parallel", TP: "tensor_parallel"}


def arrange_ranks(world: World, strategy: ParallelName, machine: MachineConfig | None = None) -> World:
    """The world with the mesh that a strategy and the axes of `machine` need. All ranks call it together."""
    assert strategy != "auto", "choose a strategy before"
    inner = {} if machine is None else list_inner_axes(machine)
    check_axes(inner, world.size)
    if not world.is_distributed:
        return world  # one process without torchrun: every strategy is the plain path
    axes: dict[str, int] = {}
    if strategy == "fsdp":
        axes = {SHARD: world.size}
    elif strategy == "hsdp":
        shards = find_shards(world.size)
        axes = {REPLICATE: world.size // shards, SHARD: shards}
    if inner:
        axes = {REPLICATE: world.size // math.prod(inner.values()), **inner}
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
    return replace(world, mesh=mesh, strategy=strategy)


def list_inner_axes(machine: MachineConfig) -> dict[str, int]:
    """The axes along which ranks share more than data, with their sizes; neighbours share the most."""
    sizes = {EP: machine.expert_parallel, CP: machine.context_parallel, TP: machine.tensor_parallel}
    return {axis: size for axis, size in sizes.items() if size > 1}


def check_axes(inner: Mapping[str, int], ranks: int) -> None:
    """Raises UserError unless the ranks fill the axes."""
    product = math.prod(inner.values())
    if ranks % product:
        flags = " x ".join(f"{FIELDS[axis]} {size}" for axis, size in inner.items())
        raise UserError(
            f"{flags} takes {product} ranks or a multiple of them, not {ranks}; start them with "
            f"torchrun --standalone --nproc_per_node={product} -m gptmill ..., or change it"
        )


def find_gradient_group(world: World) -> dist.ProcessGroup | None:
    """The ranks over which the gradients of a replicated parameter are averaged; None for all of them."""
    if world.mesh is None:
        return None
    names = tuple(name for name in world.mesh.mesh_dim_names or () if name != TP)
    return find_group(world.mesh, names)


def find_group(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks along these axes of the mesh."""
    if len(names) == 1:
        return mesh.get_group(names[0])
    return mesh[names]._flatten().get_group()


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
