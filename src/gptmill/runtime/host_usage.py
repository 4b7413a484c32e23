"""Memory of the host: in use by this process, by all in its container or machine, and left. Linux only, from /proc."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptmill.runtime.memory import GROUPS, KIBIBYTE, MEMBERSHIP, list_limit_files, read_host_memory

GIGA = 1e9
PROC = Path("/proc")
RESET_PEAK = "5"  # as written to clear_refs: see proc(5)
USAGE_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def read_host_usage(proc: Path = PROC, membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> dict[str, float]:
    """host_memory_gb: of this process; host_memory_used: used fraction of the machine, or of its container's limit.

    Cached files do not count, of which memory-mapped shards are a part: the kernel drops them when memory is short.
    """
    usage = {}
    with suppress(OSError, KeyError, ValueError):
        own = _read_table(proc / "self/status")
        usage["host_memory_gb"] = (own["RssAnon"] + own["RssShmem"]) * KIBIBYTE / GIGA
    used = []
    with suppress(OSError, KeyError, ValueError, ZeroDivisionError):
        machine = _read_table(proc / "meminfo")
        used.append(1 - machine["MemAvailable"] / machine["MemTotal"])
    for path in list_limit_files(membership, groups):
        with suppress(OSError, KeyError, ValueError, ZeroDivisionError):
            in_use, limit = _measure_group(path)
            used.append(in_use / limit)
    if used:
        usage["host_memory_used"] = max(used)
    return usage


def read_available_memory(proc: Path = PROC, membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> int | None:
    """Bytes that this process can still take before the system kills it: the machine's, or its container's.

    None if the system does not report it. Cached files count as available.
    """
    available = []
    with suppress(OSError, KeyError, ValueError):
        available.append(_read_table(proc / "meminfo")["MemAvailable"] * KIBIBYTE)
    for path in list_limit_files(membership, groups):
        with suppress(OSError, KeyError, ValueError):
            in_use, limit = _measure_group(path)
            available.append(max(0, limit - in_use))
    return min(available, default=None)


def read_host_room(proc: Path = PROC, membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> int | None:
    """What is available, or all that there is where the system does not tell; None if neither is known."""
    available = read_available_memory(proc, membership, groups)
    return read_host_memory(membership, groups) if available is None else available


def measure_growth(action: Callable[[], object], proc: Path = PROC) -> int | None:
    """Bytes by which this process grows at most during an action; None, and the action is not run, if unknown."""
    try:
        (proc / "self/clear_refs").write_text(RESET_PEAK, encoding="utf-8")
        before = _read_table(proc / "self/status")["VmRSS"]
    except (OSError, KeyError, ValueError):
        return None
    action()
    return max(0, _read_table(proc / "self/status")["VmHWM"] - before) * KIBIBYTE


def _measure_group(limit_file: Path) -> tuple[int, int]:
    """Bytes in use in a cgroup, and its limit."""
    limit = int(limit_file.read_text(encoding="utf-8"))
    used = int(limit_file.with_name(USAGE_FILES[limit_file.name]).read_text(encoding="utf-8"))
    stat = _read_table(limit_file.with_name("memory.stat"))
    files = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, used - files), limit


def _read_table(path: Path) -> dict[str, int]:
    """The lines `name number`, with or without a colon and a unit; others are left out."""
    rows = (line.replace(":", " ").split() for line in path.read_text(encoding="utf-8").split("\n"))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
