"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from gptmill.runtime.host_allocator import keep_freed_memory, keep_large_blocks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")
MEGABYTE = 1 << 20


def count_faults(tensor_megabytes: int, rounds: int = 5) -> int:
    """Page faults of a process that allocates and frees 64 MB again and again, in tensors of this size."""
    before = 0
    for number in range(rounds + 2):
        if number == 2:  # the first rounds fault in any case
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.empty(tensor_megabytes * MEGABYTE // 4).fill_(1) for _ in range(64 // tensor_megabytes)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def test_what_was_freed_is_not_faulted_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 64 * MEGABYTE // resource.getpagesize()
    with keep_freed_memory():
        assert count_faults(1) < pages // 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    with keep_freed_memory(), keep_large_blocks():  # the user has tuned malloc
        pass


def test_large_blocks_are_not_faulted_in_again_where_they_are_kept() -> None:
    pages = 64 * MEGABYTE // resource.getpagesize()
    with keep_freed_memory():
        with keep_large_blocks():
            count_faults(64)  # the arena grows until one fits between others
            assert count_faults(64) < pages // 10
        kept = read_resident_bytes()
    assert read_resident_bytes() < kept - 60 * MEGABYTE, "the system has them back"


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1.2"))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: pytest.fail("nothing to be called"))
    with keep_freed_memory(), keep_large_blocks():
        pass
