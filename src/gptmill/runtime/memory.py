"""Memory of the GPU and the host: capacity, peak use, and recognising out-of-memory errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

KIBIBYTE = 1024
NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch's messages on x86 CPUs and on others
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def read_device_memory(device: torch.device) -> int | None:
    """Total memory of a GPU in bytes; None for devices that use host memory."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def read_host_memory(membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> int | None:
    """Host memory that this process may use, in bytes: the machine's, or the limit of its container or job.

    None if the system does not report it.
    """
    limits = []
    for path in list_limit_files(membership, groups):
        with suppress(OSError, ValueError):  # no limit, or "max"
            limits.append(int(path.read_text(encoding="utf-8")))
    with suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def list_limit_files(membership: Path, groups: Path) -> Iterator[Path]:
    """Where this process's cgroups (v1 or v2) and all their ancestors keep a memory limit; some have none."""
    try:
        lines = membership.read_text(encoding="utf-8").split("\n")
    except OSError:  # no cgroups on this system
        return
    for line in filter(None, lines):
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        path = PurePosixPath(inside.lstrip("/"))
        for group in (path, *path.parents):
            yield top / group / name


def read_peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated by tensors on a GPU, resident for the process elsewhere. Does not synchronise.

    0 if the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
