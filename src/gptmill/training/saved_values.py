"""Reads back what a checkpoint says beside its tensors. It may be a stranger's: every number is looked at first."""

from __future__ import annotations

import math
from typing import Any

MAX_COUNT = 2**62


def read_count(value: Any, name: str) -> int:
    """A whole number that counts something; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{name} is {value!r:.60}, which is no count")
    return value


def read_number(value: Any, name: str) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.60}, which is no number")
    return float(value)


def read_spans(value: Any, name: str) -> list[tuple[int, int]]:
    """Ranges of windows: each its first, and the one after its last."""
    spans = []
    for span in read_list(value, name):
        first, end = (read_count(number, name) for number in read_list(span, name, length=2))
        if first > end:
            raise ValueError(f"{name} ends before it begins: {first} to {end}")
        spans.append((first, end))
    return spans


def read_list(value: Any, name: str, length: int | None = None) -> list[Any]:
    """A list, of some length."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{name} is {value!r:.60}, which is no such list")
    return value


def read_dict(value: Any, name: str) -> dict[str, Any]:
    """A table of names."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.60}, which is no table")
    return value
