"""A rank's part of a sharded tensor (a DTensor) as a plain tensor, and back. Plain tensors pass unchanged.

Importing DTensor and FSDP takes most of a second, so that only those who shard do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, by what only these have."""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, in the memory of the tensor and outside of autograd."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def wrap_like(local: Tensor, tensor: Tensor) -> Tensor:
    """The tensor of which `local` is this rank's part, sharded as `tensor` is; of another shape, `local` is whole."""
    if not is_sharded(tensor) or local.shape != to_local(tensor).shape:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into one of which this rank may hold a part only. Needs no other rank."""
    if is_sharded(whole):
        assert is_sharded(target), "parts cannot make a whole without the other ranks"
        to_local(target).copy_(to_local(whole))
    elif is_sharded(target):
        to_local(target).copy_(take_part(whole, target))
    else:
        target.copy_(whole)


def take_part(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor that this rank holds of a sharded one."""
    shape, offset = find_place(like)
    return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def find_place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; all ranks call it together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def reshard(model: nn.Module) -> None:
    """Frees what an evaluation has gathered: FSDP's root keeps its weights for a backward pass, which comes too late
    where the weights change first."""
    if is_fsdp(model):
        model.reshard()


def is_fsdp(model: nn.Module) -> TypeGuard[Any]:
    """Whether FSDP shards the model, by what only its modules have."""
    return hasattr(model, "set_requires_gradient_sync")
