"""Host memory: that of the process without mapped files, and the fraction that is in use."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path

import pytest

from gptmill.runtime.host_usage import measure_growth, read_available_memory, read_host_room, read_host_usage

STATUS = "Name:\tpython\nVmRSS:\t 9000000 kB\nRssAnon:\t 2000000 kB\nRssFile:\t 6000000 kB\nRssShmem:\t 1000000 kB\n"
MEMINFO = "MemTotal:       8000000 kB\nMemFree:         100000 kB\nMemAvailable:    2000000 kB\n"


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "groups", "used", "available"),
    [
        ("", {}, 0.75, 2_048_000_000),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "5000"}, 0.75, 2_048_000_000),
        (
            "0::/job\n",
            {"job/memory.max": "1000", "job/memory.current": "990", "job/memory.stat": "anon 800\nactive_file 90\n"},
            0.9,
            100,
        ),
        (
            "4:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "1000",
                "memory/job/memory.usage_in_bytes": "900",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            0.8,
            200,
        ),
    ],
    ids=["a machine", "no limit", "a container", "a container of the first version"],
)
def test_usage_is_that_of_the_machine_or_of_the_container(
    membership: str, groups: dict[str, str], used: float, available: int, tmp_path: Path
) -> None:
    write_files(tmp_path, {"proc/self/status": STATUS, "proc/meminfo": MEMINFO, "cgroup": membership})
    write_files(tmp_path / "groups", groups)
    files = tmp_path / "proc", tmp_path / "cgroup", tmp_path / "groups"
    usage = read_host_usage(*files)
    assert read_available_memory(*files) == read_host_room(*files) == available
    assert usage == {"host_memory_gb": pytest.approx(3.072), "host_memory_used": pytest.approx(used)}


def test_a_system_without_these_files_reports_nothing(tmp_path: Path) -> None:
    assert read_host_usage(tmp_path, tmp_path / "cgroup", tmp_path) == {}
    assert read_available_memory(tmp_path, tmp_path / "cgroup", tmp_path) is None
    assert measure_growth(lambda: pytest.fail("it cannot be measured"), tmp_path) is None


def test_a_container_at_its_limit_has_no_room_and_is_not_taken_for_one_without_a_limit(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/meminfo": MEMINFO, "cgroup": "0::/job"})
    write_files(tmp_path / "groups/job", {"memory.max": "1000", "memory.current": "1000", "memory.stat": ""})
    assert read_host_room(tmp_path / "proc", tmp_path / "cgroup", tmp_path / "groups") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_reports_its_usage() -> None:
    usage = read_host_usage()
    assert usage["host_memory_gb"] > 0.01
    assert 0 < usage["host_memory_used"] < 1
    available = read_available_memory()
    assert available is not None
    assert available > 2**24


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_growth_is_that_of_the_peak_even_if_it_is_freed() -> None:
    def grow() -> None:
        with mmap.mmap(-1, 1 << 26) as block:  # the heap may have room left by what was freed before
            block[:: resource.getpagesize()] = bytes(len(block) // resource.getpagesize())

    growth = measure_growth(grow)
    assert growth is not None
    assert growth >= 60e6
