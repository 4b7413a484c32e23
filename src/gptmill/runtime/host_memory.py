"""Host memory that a GPU can copy into on its own, allocated once and used again and again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64


class HostCopy:
    """Room for a copy of some tensors in host memory: page-locked where they come from a GPU."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = _allocate(size, device)
        self._views = {
            name: memory[offset : offset + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, offset in offsets.items()
        }

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


def _allocate(size: int, device: torch.device) -> Tensor:
    """Bytes of exactly this size; torch's own page-locked memory comes in powers of two, up to twice too much."""
    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        memory.zero_()  # pages must exist before they can be locked
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    return memory
