"""World: this process's rank, the world size, the device, and the collectives between ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gptmill.config.errors import UserError
from gptmill.config.run import DeviceName, ParallelName
from gptmill.runtime.device import choose_device
from gptmill.runtime.ranks import Ranks, join_ranks, read_variable

# The main rank may prepare a corpus or write a large checkpoint while the others wait for it.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
# Gloo's thread needs the GIL to release its last tensors, and destroying the group joins that thread while holding the
# GIL: a deadlock, unless the thread has finished before.
GLOO_DRAIN_SECONDS = 0.2
EP, CP, TP = "ep", "cp", "tp"  # axes of a mesh: ranks that share experts, windows, layers
SHARED_DATA_AXES = (CP, TP)  # ranks along them work on the same windows


@dataclass(frozen=True)
class World:
    """One process among all that train together."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """The ranks along named axes: replicate, shard, cp, tp; None where all of them only replicate the model."""
    strategy: ParallelName = "ddp"
    """What the ranks share: see `--parallel`. Never "auto"."""
    ranks: Ranks | None = field(default=None, kw_only=True)
    """How ranks keep in touch beside the collectives; None without torchrun."""

    @property
    def data_rank(self) -> int:
        """The number of this rank among those that read different data."""
        if self.mesh is None:
            return self.rank
        number = 0
        for name in _list_data_axes(self.mesh):
            number = number * self.axis_size(name) + self.mesh.get_local_rank(name)
        return number

    @property
    def data_size(self) -> int:
        """How many ranks read different data: those of one tp or cp axis share theirs."""
        return self.size if self.mesh is None else math.prod(map(self.axis_size, _list_data_axes(self.mesh)))

    @property
    def gradient_rank(self) -> int:
        """The number of this rank among those that compute different summands of a gradient."""
        return self.rank // self.axis_size(TP)

    @property
    def gradient_size(self) -> int:
        """How many ranks compute different summands of a gradient: of those that share every layer, one."""
        return self.size // self.axis_size(TP)

    @property
    def shards_weights(self) -> bool:
        """Whether each rank holds a part of some weights only: then a forward pass needs all ranks."""
        return self.uses_fsdp or self.axis_size(TP) * self.axis_size(EP) > 1

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP shards all parameters, gradients and optimizer state."""
        return self.strategy in ("fsdp", "hsdp") and self.is_distributed

    @property
    def shares_forward(self) -> bool:
        """Whether a rank waits for others in a forward pass: then they must all run the same ones."""
        return self.shards_weights or self.axis_size(CP) > 1

    def find_group(self, name: str) -> dist.ProcessGroup:
        """The ranks along an axis of the mesh, of which this rank is one."""
        assert self.mesh is not None
        return self.mesh.get_group(name)

    def axis_size(self, name: str) -> int:
        """How many ranks an axis of the mesh has; 1 for one that is not there."""
        if self.mesh is None or name not in (self.mesh.mesh_dim_names or ()):
            return 1
        return self.mesh.size(self.mesh.mesh_dim_names.index(name))  # type: ignore[union-attr]

    def axis_rank(self, name: str) -> int:
        """The number of this rank along an axis of the mesh."""
        return self.mesh.get_local_rank(name) if self.mesh is not None and self.axis_size(name) > 1 else 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group; under torchrun there is one even for a single rank."""
        return dist.is_initialized()

    def run_on_main(self, action: Callable[[], None]) -> None:
        """Runs the action on rank 0 while the others wait; a UserError there is raised on all ranks."""
        if self.ranks is not None:
            self.ranks.store.share("action", action)
        elif self.is_main:
            action()

    def together(self) -> AbstractContextManager[None]:
        """What ranks do each for itself, without collectives; if one raises a UserError inside, they all do."""
        return nullcontext() if self.ranks is None else self.ranks.store.together("checks")

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Synchronises with the device."""
        return bool(self.all_reduce_sum(torch.tensor(float(flag), device=self.device)).item())

    def all_reduce_sum(self, tensor: Tensor, axis: str | None = None) -> Tensor:
        """Sums in place over all ranks, or those of an axis, on the device, without synchronising with the host."""
        if axis is not None:
            if self.axis_size(axis) > 1:
                assert self.mesh is not None
                dist.all_reduce(tensor, group=self.mesh.get_group(axis))
        elif self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors on all ranks by those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The same over the ranks that read different data; those that read the same must hold the same."""
        copies = self.size // self.data_size
        return self.all_reduce_sum(tensor) if copies == 1 else self.all_reduce_sum(tensor).div_(copies)


def _list_data_axes(mesh: DeviceMesh) -> list[str]:
    return [name for name in mesh.mesh_dim_names or () if name not in SHARED_DATA_AXES]


@contextmanager
def open_world(device_name: DeviceName) -> Iterator[World]:
    """Joins the process group described by torchrun's environment variables, and leaves it at the end."""
    with join_ranks() as ranks:
        if ranks is None:
            yield World(0, 1, choose_device(device_name))
            return
        rank, size = ranks.store.rank, ranks.store.size
        with ranks.store.together("devices"):
            device = choose_device(device_name, local_rank=read_variable("LOCAL_RANK"))
            if device.type == "mps":
                raise UserError("several ranks cannot share one MPS device; start one process, or add --device cpu")
        check_devices(ranks.store.gather("device", device.type))
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=COLLECTIVE_TIMEOUT,
            store=ranks.store.open_store("default_pg"),
            rank=rank,
            world_size=size,
            device_id=device if on_gpu else None,
        )
        try:
            yield World(rank, size, device, ranks=ranks)
        finally:
            if not on_gpu:
                time.sleep(GLOO_DRAIN_SECONDS)
            dist.destroy_process_group()


def check_devices(kinds: list[str]) -> None:
    """Raises UserError if ranks have devices of different kinds: a GPU that one does not find."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UserError(
                f"rank {rank} would train on {kind}, but rank 0 on {kinds[0]}; run gptmill doctor on its machine, or "
                f"add --device {kind}"
            )
