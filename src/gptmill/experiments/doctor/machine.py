"""Checks of the machine besides GPUs and disks: memory, shared memory, cores, open files and the clock."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath

import gptmill
from gptmill.experiments.doctor.facts import MachineFacts
from gptmill.experiments.doctor.finding import Finding

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

GROUP = "machine"
LEAST_MEMORY = 2e9
LEAST_SHARED = 1 << 30
LEAST_OPEN_FILES = 1024
MAX_SKEW_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def check_memory(facts: MachineFacts) -> Finding:
    if facts.host_bytes is None:
        return Finding(GROUP, "memory", "skipped", "the system does not report it")
    what = f"{facts.host_bytes / 1e9:,.1f} GB for this process"
    if facts.host_bytes < LEAST_MEMORY:
        return Finding(GROUP, "memory", "warning", what, "enough for tiny models only", "raise the container's limit")
    return Finding(GROUP, "memory", "ok", what)


def check_shared_memory(gpus: int, folder: Path = SHARED_MEMORY) -> Finding:
    """NCCL exchanges data between the GPUs of a machine through it; Docker gives 64 MB."""
    if not folder.is_dir():
        return Finding(GROUP, "shared memory", "skipped", f"there is no {folder} here")
    size = shutil.disk_usage(folder).total
    what = f"{size / 1e6:,.0f} MB in {folder}"
    if size < LEAST_SHARED and gpus > 1:
        meaning = "NCCL may fail between the GPUs of this machine"
        return Finding(GROUP, "shared memory", "warning", what, meaning, "docker run --shm-size=8g (or --ipc=host)")
    return Finding(GROUP, "shared memory", "ok", what)


def check_cores(facts: MachineFacts, quota: float | None) -> Finding:
    """Threads that outnumber the cores of a container wait for each other."""
    cores = count_cores()
    allowed = min(cores, quota or cores)
    limit = "" if quota is None or quota >= cores else f", limited to {quota:g} by its cgroup"
    what = f"{cores} cores{limit}; torch uses {facts.threads} threads"
    if facts.threads > max(1.0, allowed):
        fix = f"export OMP_NUM_THREADS={max(1, int(allowed))}"
        return Finding(GROUP, "cores", "warning", what, "more threads than cores: slow on a CPU", fix)
    return Finding(GROUP, "cores", "ok", what)


def count_cores() -> int:
    """The cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def read_quota(membership: Path = MEMBERSHIP, groups: Path = GROUPS) -> float | None:
    """Cores that the process's cgroups (v2 or v1) allow; None if they set no limit."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
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


def check_open_files() -> Finding:
    if resource is None:
        return Finding(GROUP, "open files", "skipped", "this system sets no limit")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES:
        more = LEAST_OPEN_FILES if most == resource.RLIM_INFINITY else max(limit, min(most, 65536))
        meaning = "a corpus of many shards, or many connections, may fail with 'Too many open files'"
        return Finding(GROUP, "open files", "warning", f"at most {limit}", meaning, f"ulimit -n {more}")
    return Finding(GROUP, "open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")


def check_clock(now: float | None = None, installed: Path = Path(gptmill.__file__)) -> Finding:
    """A clock that is behind: downloads fail, and the newest run is not the newest."""
    now = time.time() if now is None else now
    what = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now + MAX_SKEW_SECONDS < installed.stat().st_mtime:
        meaning = "it is earlier than gptmill's own files: TLS downloads fail, and --resume finds the wrong newest run"
        return Finding(GROUP, "clock", "warning", what, meaning, "sudo timedatectl set-ntp true")
    return Finding(GROUP, "clock", "ok", what)
