"""World: which rank this is, of how many, on which device, and how the ranks agree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import DeviceName
from gptmill.runtime.device import choose_device

# The main rank may prepare a corpus or write a large checkpoint while the others wait for it.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
# Gloo's thread lets go of the last tensors under Python's lock, and a group that is let go of under the same lock waits
# for that thread: for ever, where it came too late.
SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class World:
    """One process' place among all that train together."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether a process group exists, which torchrun makes even for one rank."""
        return dist.is_initialized()

    def run_on_main(self, action: Callable[[], None]) -> None:
        """Runs it on the main rank while the others wait; what the user got wrong there ends them all."""
        mistake: UserError | None = None
        if self.is_main:
            try:
                action()
            except UserError as error:
                mistake = error
        failures = self.sum_over_ranks(torch.tensor(float(mistake is not None), device=self.device))
        if mistake is not None:
            raise mistake
        if failures.item():
            raise UserError("stopped, because rank 0 did")

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum_over_ranks(torch.tensor(float(flag), device=self.device)).item())

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sums in place, on the device, without waiting for it."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor


def read_world_size() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


@contextmanager
def open_world(device_name: DeviceName) -> Iterator[World]:
    """Joins the process group that torchrun announces in the environment, and leaves it at the end."""
    if "RANK" not in os.environ:
        yield World(0, 1, choose_device(device_name))
        return
    device = choose_device(device_name, local_rank=int(os.environ["LOCAL_RANK"]))
    if device.type == "mps":
        raise UserError("several ranks cannot share Apple's MPS; start one process, or add --device cpu")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None
    )
    try:
        yield World(int(os.environ["RANK"]), read_world_size(), device)
    finally:
        if not on_gpu:
            time.sleep(SETTLE_SECONDS)
        dist.destroy_process_group()
