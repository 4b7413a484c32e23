"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from gptmill.runtime.host_allocator import keep_freed_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")
MEGABYTE = 1 << 20


def count_faults(rounds: int = 5) -> int:
    """Page faults of a process that allocates and frees gradients of 64 MB again and again."""
    before = 0
    for number in range(rounds + 2):
        if number == 2:  # the first rounds fault in any case
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.empty(MEGABYTE // 4).fill_(1) for _ in range(64)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_was_freed_is_not_faulted_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 64 * MEGABYTE // resource.getpagesize()
    with keep_freed_memory():
        assert count_faults() < pages // 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    with keep_freed_memory():  # the user has tuned malloc
        pass


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1.2"))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: pytest.fail("nothing to be called"))
    with keep_freed_memory():
        pass
