"""Host memory that a GPU can copy into on its own, allocated once and used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64
PAGE_BYTES = mmap.PAGESIZE


class HostCopy:
    """Room for a copy of some tensors in host memory: page-locked where they come from a GPU."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = memory = _allocate(size)
        self._is_locked = _lock(memory, device)
        self._views = {
            name: memory[offset : offset + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, offset in offsets.items()
        }

    def __del__(self) -> None:
        if self._is_locked:  # else the next to be given this memory could not lock it
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors of these names, shapes and types have their place here."""
        return self._views.keys() == tensors.keys() and all(
            self._views[name].shape == tensor.shape and self._views[name].dtype == tensor.dtype
            for name, tensor in tensors.items()
        )

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying: the device does it in the order of its other work, while the host goes on."""
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor.detach(), non_blocking=True)
        return dict(self._views)


def _allocate(size: int) -> Tensor:
    """Whole pages of its own, of no more than this size: torch's page-locked memory comes in powers of two."""
    room = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(room + PAGE_BYTES, dtype=torch.uint8)
    offset = -memory.data_ptr() % PAGE_BYTES
    return memory[offset : offset + room].zero_()  # pages must exist before they can be locked


def _lock(memory: Tensor, device: torch.device) -> bool:
    """Locks the pages for a GPU; where the system does not allow that, copies are slower and nothing else."""
    if device.type != "cuda" or not memory.numel():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
