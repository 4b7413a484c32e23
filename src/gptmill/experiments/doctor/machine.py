"""Checks of the machine besides GPUs and disks: memory, shared memory, cores, open files and the clock."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import gptmill
from gptmill.experiments.doctor.facts import MachineFacts
from gptmill.experiments.doctor.finding import Finding
from gptmill.runtime.cpu_usage import list_cpus

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
    cores = len(list_cpus())
    allowed = min(cores, quota or cores)
    limit = "" if quota is None or quota >= cores else f", limited to {quota:g} by its cgroup"
    what = f"{cores} cores{limit}; torch uses {facts.threads} threads"
    if facts.threads > max(1.0, allowed):
        fix = f"export OMP_NUM_THREADS={max(1, int(allowed))}"
        return Finding(GROUP, "cores", "warning", what, "more threads than cores: slow on a CPU", fix)
    return Finding(GROUP, "cores", "ok", what)


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
