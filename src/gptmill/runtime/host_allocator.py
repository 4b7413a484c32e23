"""Settings of the C library's allocator while a process computes on the CPU."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # glibc's malloc.h
USUAL_MMAP_MAX = 65_536  # blocks
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's limit, which it reaches by itself as large blocks are freed
USUAL_TRIM_THRESHOLD = 2 * LARGEST_MMAP_THRESHOLD  # as glibc would have it then
KEPT_BYTES = 1 << 30


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keeps memory that a step frees for the next one, instead of returning it to the system and faulting it in again.

    Gradients come and go in every micro-batch. Does nothing where the user has tuned malloc, or the library is another.
    """
    library = _find_glibc()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    try:
        yield
    finally:
        library.mallopt(M_TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)
        library.malloc_trim(0)


@contextmanager
def keep_large_blocks() -> Iterator[None]:
    """Within keep_freed_memory(), keeps blocks above the largest threshold, too, which are else mapped one by one.

    The logits of 2,048 tokens of a vocabulary of 4,096 are such a block; to fault them in takes a third of a small
    model's step. Torch wants its blocks aligned, for which glibc takes larger ones than it freed before. So memory has
    gaps, and this is only for those who have enough of it.
    """
    library = _find_glibc()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_MAX, USUAL_MMAP_MAX)


def _find_glibc() -> ctypes.CDLL | None:
    """The C library; None if it is another, or tuned by the user."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not _is_tuned() else None


def _is_tuned() -> bool:
    is_named = any(name.startswith("MALLOC_") for name in os.environ)
    return is_named or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
