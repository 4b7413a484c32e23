"""Cores: those that a process may use by its affinity and its cgroups, and how busy they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptmill.runtime.cpu_usage import CpuMeter, count_physical, find_cores, list_cpus, read_quota


def test_a_limit_of_cgroup_v1_counts_too(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/job\n4:memory:/job\n", encoding="utf-8")
    group = tmp_path / "cpu" / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000", encoding="utf-8")
    (group / "cpu.cfs_period_us").write_text("100000", encoding="utf-8")
    assert read_quota(tmp_path / "cgroup", tmp_path) == 3.0


def test_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}", encoding="utf-8")
    assert count_physical(range(8), tmp_path) == 4
    assert count_physical([0, 1, 4], tmp_path) == 2
    assert count_physical(range(8), tmp_path / "absent") == 4


def write_stat(path: Path, **ticks: tuple[int, int]) -> None:
    """User and idle ticks of each core; the tenth field, guest, is part of the first."""
    lines = [f"{name} {user} 0 0 {idle} 0 0 0 0 {user} 0" for name, (user, idle) in ticks.items()]
    path.write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "btime 1", ""]), encoding="utf-8")


def test_a_meter_tells_the_cores_of_this_process_and_those_that_idle(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    clock, cpu_clock = iter([0.0, 0.01, 2.0]), iter([5.0, 5.01, 8.0])
    write_stat(stat, cpu0=(100, 100), cpu1=(100, 100), cpu2=(0, 0))
    meter = CpuMeter([0, 1], stat, lambda: next(clock), lambda: next(cpu_clock))
    assert meter() == {}  # too soon
    write_stat(stat, cpu0=(300, 100), cpu1=(250, 150), cpu2=(0, 500))
    assert meter() == {"host_cpu_cores": 1.5, "host_idle_cores": 0.25}


def test_a_system_that_does_not_count_ticks_tells_the_cores_of_this_process(tmp_path: Path) -> None:
    def count(step: float) -> Iterator[float]:
        yield from (0.0, step)

    clock, cpu_clock = count(2.0), count(1.0)
    meter = CpuMeter([0], tmp_path / "absent", lambda: next(clock), lambda: next(cpu_clock))
    assert meter() == {"host_cpu_cores": 0.5}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
def test_this_machine_has_cores() -> None:
    cores = find_cores()
    assert 0 < cores.allowed <= len(list_cpus())
    assert 1 <= cores.physical <= len(list_cpus())
