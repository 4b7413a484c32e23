"""The machine's memory: how much a GPU has, how much was used at most, and what running out of it looks like."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

try:
    import resource
except ImportError:  # Windows tells no peak this way
    resource = None  # type: ignore[assignment]

KIBIBYTE = 1024
NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch on x86 CPUs, and on others
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def read_device_memory(device: torch.device) -> int | None:
    """All the memory that a GPU has, in bytes; None for devices that share the machine's."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def read_host_memory(membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> int | None:
    """All the memory of the machine, or of the container or job, that this process may use, in bytes.

    None where the system does not tell.
    """
    limits = list(_list_limits(membership, groups))
    with suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _list_limits(membership: Path, groups: Path) -> Iterator[int]:
    """What the control groups of this process allow, of either version: each of them and all above it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # other systems have no such groups
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        path = PurePosixPath(inside.lstrip("/"))
        for group in (path, *path.parents):
            try:
                yield int((top / group / name).read_text(encoding="utf-8"))
            except (OSError, ValueError):  # none there, or "max"
                continue


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
