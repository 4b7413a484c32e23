"""A rank's part of a sharded tensor (a DTensor) as a plain tensor, and back. Plain tensors pass unchanged."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def to_local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, in the memory of the tensor and outside of autograd."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def wrap_like(local: Tensor, tensor: Tensor) -> Tensor:
    """The tensor of which `local` is this rank's part, sharded as `tensor` is; of another shape, `local` is whole."""
    if not isinstance(tensor, DTensor) or local.shape != to_local(tensor).shape:
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into one of which this rank may hold a part only. Needs no other rank."""
    if isinstance(whole, DTensor):
        assert isinstance(target, DTensor), "parts cannot make a whole without the other ranks"
        to_local(target).copy_(to_local(whole))
    elif isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        part = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        to_local(target).copy_(part)
    else:
        target.copy_(whole)


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; all ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Frees what an evaluation has gathered: FSDP's root keeps its weights for a backward pass, which comes too late
    where the weights change first."""
    if isinstance(model, FSDPModule):
        model.reshard()
