"""Makes a model that several ranks train together. Called once, before the optimizer is built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gptmill.runtime.parallel.mesh import REPLICATE, SHARD, find_gradient_group
from gptmill.runtime.world import World


def parallelize(
    model: nn.Module,
    world: World,
    blocks: Sequence[nn.Module] = (),
    methods: Sequence[str] = (),
    compute_dtype: torch.dtype | None = None,
    experts: Sequence[str] = (),
) -> nn.Module:
    """What a training step calls in the place of the model: the model itself on one rank without a process group.

    Sharded weights are gathered block by block, in `compute_dtype`, for the forward pass and again for the backward
    pass; `methods` are those of the model that need its own weights besides `forward`. `experts` are
    parameters that ranks hold some of each, and whose gradients are averaged by `average_experts`.
    """
    if not world.is_distributed:
        return model
    if world.strategy == "zero1":  # DDP without its hooks: the gradients go to the owners of the parameters
        world.broadcast(model.state_dict().values())
        return model
    if not world.uses_fsdp:
        return replicate(model, world, experts)
    _shard(model, find_data_mesh(world), blocks, compute_dtype)
    for name in methods:
        _add_forward_method(model, name)
    return model


def _shard(model: nn.Module, mesh: DeviceMesh, blocks: Sequence[nn.Module], compute_dtype: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Inputs keep their dtype: bf16 would round RoPE's tables. Gradients are summed over the ranks in fp32.
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Its weights are needed again at once, by the LM head's backward pass, or by its forward pass for a sample.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Fused blocks return views; what they warn of, a change in place, happens to none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def _add_forward_method(model: nn.Module, name: str) -> None:
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, name)


def replicate(model: nn.Module, world: World, experts: Sequence[str] = ()) -> nn.Module:
    """DDP over the ranks that compute different summands of the gradients, for all parameters but experts."""
    group = find_gradient_group(world)
    if group is not None and group.size() == 1:
        return model  # the ranks share every layer, and each of them has the whole batch
    if experts:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=group)


def find_data_mesh(world: World) -> DeviceMesh:
    """The axes along which FSDP shards and replicates."""
    assert world.mesh is not None
    names = world.mesh.mesh_dim_names or ()
    chosen = tuple(name for name in (REPLICATE, SHARD) if name in names)
    return world.mesh if chosen == names else world.mesh[chosen]
