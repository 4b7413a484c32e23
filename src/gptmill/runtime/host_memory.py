"""Pinned host memory for asynchronous copies from a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64
PAGE_BYTES = mmap.PAGESIZE


class HostBuffer:
    """A reusable host copy of a set of tensors: in pinned (page-locked) memory if they are on a GPU."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = memory = _allocate(size)
        self._is_pinned = _pin(memory, device)
        self._views = {
            name: memory[offset : offset + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, offset in offsets.items()
        }

    def __del__(self) -> None:
        if self._is_pinned:  # otherwise the next owner of this memory could not pin it
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the buffer was allocated for these names, shapes and dtypes."""
        return self._views.keys() == tensors.keys() and all(
            self._views[name].shape == tensor.shape and self._views[name].dtype == tensor.dtype
            for name, tensor in tensors.items()
        )

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueues the copies on the current stream without waiting for them; returns the host tensors."""
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor.detach(), non_blocking=True)
        return dict(self._views)


def send_to_host(values: Tensor) -> Tensor:
    """Starts an asynchronous copy into pinned memory. Read it only after the device has reached this point."""
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _allocate(size: int) -> Tensor:
    """Whole pages for `size` bytes. torch's own pinned allocator rounds up to a power of two."""
    padded = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(padded + PAGE_BYTES, dtype=torch.uint8)
    offset = -memory.data_ptr() % PAGE_BYTES
    return memory[offset : offset + padded].zero_()  # touch the pages: only resident ones can be pinned


def _pin(memory: Tensor, device: torch.device) -> bool:
    """Pins the pages for a GPU. Where the system does not allow it, copies are merely slower."""
    if device.type != "cuda" or not memory.numel():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
