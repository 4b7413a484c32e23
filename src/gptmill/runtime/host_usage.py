"""Memory in use on the host: by this process, and by all in its container or machine. Linux only, from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gptmill.runtime.memory import GROUPS, KIBIBYTE, MEMBERSHIP, list_limit_files

GIGA = 1e9
PROC = Path("/proc")
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
            used.append(_measure_group(path))
    if used:
        usage["host_memory_used"] = max(used)
    return usage


def _measure_group(limit_file: Path) -> float:
    """The used fraction of a cgroup's limit."""
    limit = int(limit_file.read_text(encoding="utf-8"))
    used = int(limit_file.with_name(USAGE_FILES[limit_file.name]).read_text(encoding="utf-8"))
    stat = _read_table(limit_file.with_name("memory.stat"))
    files = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, used - files) / limit


def _read_table(path: Path) -> dict[str, int]:
    """The lines `name number`, with or without a colon and a unit; others are left out."""
    rows = (line.replace(":", " ").split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
