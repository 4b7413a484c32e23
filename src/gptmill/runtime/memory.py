"""The machine's memory: how much a GPU has, how much was used at most, and what running out of it looks like."""

from __future__ import annotations

import os
import sys

import torch

try:
    import resource
except ImportError:  # Windows tells no peak this way
    resource = None  # type: ignore[assignment]

KIBIBYTE = 1024
NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch on x86 CPUs, and on others


def read_device_memory(device: torch.device) -> int | None:
    """All the memory that a GPU has, in bytes; None for devices that share the machine's."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def read_host_memory() -> int | None:
    """All the memory that the machine has, in bytes; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def read_peak_memory(device: torch.device) -> int:
    """The most bytes held at once so far: by tensors on a GPU, by the whole process elsewhere. Waits for nothing.

    0 where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
