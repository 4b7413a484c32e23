"""Cores of the host: those that this process may use, those that it keeps busy, and those that idle.

Does not import torch: gptmill doctor also looks at machines where that fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
STAT = Path("/proc/stat")
TOPOLOGY = Path("/sys/devices/system/cpu")
IDLE_FIELDS = slice(3, 5)  # idle and iowait: see proc(5)
COUNTED_FIELDS = 8  # the others are part of these
MIN_SECONDS = 0.1  # ticks of the system are 10 ms long


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use."""

    allowed: float
    """By its affinity, or by the quota of its container or job, whichever is less; both threads of a core count."""
    physical: int
    """By its affinity; where the system does not tell, as if each had two threads."""


def find_cores() -> Cores:
    cpus = list_cpus()
    return Cores(min(len(cpus), read_quota() or len(cpus)), count_physical(cpus))


def list_cpus() -> list[int]:
    """The numbers of the logical CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def count_physical(cpus: Sequence[int], topology: Path = TOPOLOGY) -> int:
    """How many cores these logical CPUs are."""
    found = set()
    for cpu in cpus:
        with suppress(OSError):
            found.add((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8"))
    return len(found) or max(1, len(cpus) // 2)


def read_quota(membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> float | None:
    """Cores that the process's cgroups (v2 or v1) allow; None if they set no limit."""
    try:
        lines = membership.read_text(encoding="utf-8").split("\n")
    except OSError:
        return None
    quotas = []
    for line in filter(None, lines):
        _, controllers, inside = line.split(":", 2)
        path = PurePosixPath(inside.lstrip("/"))
        for group in (path, *path.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # no limit, or "max"
                if not controllers:
                    limit, period = (groups / group / "cpu.max").read_text(encoding="utf-8").split()
                elif "cpu" in controllers.split(","):
                    folder = groups / "cpu" / group
                    limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
                    period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
                else:
                    continue
                if int(limit) > 0:
                    quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


class CpuMeter:
    """Measures from call to call: host_cpu_cores, which this process kept busy, and host_idle_cores, which idled.

    Only the cores that this process may use count; Linux alone tells which of them idle.
    """

    def __init__(
        self,
        cpus: Iterable[int],
        stat: Path = STAT,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._names = {f"cpu{cpu}" for cpu in cpus}
        self._stat, self._clock, self._cpu_clock = stat, clock, cpu_clock
        self._before = self._read()

    def __call__(self) -> dict[str, float]:
        (clock, busy, ticks), (now, now_busy, now_ticks) = self._before, self._read()
        if now - clock < MIN_SECONDS:
            return {}
        self._before = now, now_busy, now_ticks
        usage = {"host_cpu_cores": (now_busy - busy) / (now - clock)}
        spent = {name: (idle - ticks[name][0], all_ - ticks[name][1]) for name, (idle, all_) in now_ticks.items()}
        if spent and all(passed > 0 for _, passed in spent.values()):
            usage["host_idle_cores"] = sum(idle / passed for idle, passed in spent.values())
        return usage

    def _read(self) -> tuple[float, float, dict[str, tuple[int, int]]]:
        """Both clocks, and the ticks of each core: idle, and all."""
        ticks = {}
        with suppress(OSError, ValueError):
            for line in filter(None, self._stat.read_text(encoding="utf-8").split("\n")):
                name, *fields = line.split()
                if name in self._names:
                    counts = [int(field) for field in fields[:COUNTED_FIELDS]]
                    ticks[name] = sum(counts[IDLE_FIELDS]), sum(counts)
        return self._clock(), self._cpu_clock(), ticks
