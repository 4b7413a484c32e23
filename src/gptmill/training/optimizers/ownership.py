"""Ownership: every parameter has one rank that sums its gradients or updates it.

Parameters are whole: Muon needs whole matrices, and kernels round the ends of vectors in their own way. The largest one
limits how evenly the work is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmill.config.errors import UserError
from gptmill.runtime.world import World


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: the largest ones first, each to the rank that has the least."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = min(range(ranks), key=loads.__getitem__)
        loads[owners[place]] += sizes[place]
    return owners


class Ownership:
    """Which rank owns which of a model's trainable parameters; the same on all ranks."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if len({parameter.dtype for parameter in self.parameters}) > 1:
            raise UserError(
                "parameters of several dtypes cannot be divided among ranks; use one dtype, or --no_exact_ranks"
            )
        self.owners = assign_owners([parameter.numel() for parameter in self.parameters], world.size)

    def select(self, rank: int) -> list[nn.Parameter]:
        """The parameters of a rank, in the order of the model."""
        return [parameter for parameter, owner in zip(self.parameters, self.owners, strict=True) if owner == rank]

    @property
    def own(self) -> list[nn.Parameter]:
        """The parameters of this rank."""
        return self.select(self.world.rank)

    def split(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """For each rank, those of the tensors, one per parameter, that belong to its parameters."""
        parts: list[list[Tensor]] = [[] for _ in range(self.world.size)]
        for tensor, owner in zip(tensors, self.owners, strict=True):
            parts[owner].append(tensor)
        return parts

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites each of the tensors, one per parameter, by what its owner holds."""
        if self.world.size == 1:
            return
        for owner, part in enumerate(self.split(tensors)):
            if part:
                flat = flatten(part)
                dist.broadcast(flat, src=owner)
                if owner != self.world.rank:
                    torch._foreach_copy_(part, split_flat(flat, part))

    def sum_to_owners(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks of the gradients of this rank's parameters, in any order of addition."""
        own: list[Tensor] = []
        for owner, part in enumerate(self.split(gradients)):
            if part and self.world.size > 1:
                flat = flatten(part)
                dist.reduce(flat, dst=owner)
                part = split_flat(flat, part)
            if owner == self.world.rank:
                own = part
        return own


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """One vector with the elements of all tensors."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_flat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a vector with the shapes of the tensors that it was made of."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
