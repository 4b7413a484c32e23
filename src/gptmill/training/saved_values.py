"""Validates the JSON values of a checkpoint, which may come from an untrusted source."""

from __future__ import annotations

import math
from typing import Any

MAX_COUNT = 2**62


def read_count(value: Any, name: str) -> int:
    """A non-negative integer; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{name} is {value!r:.60}, not a non-negative integer")
    return value


def read_number(value: Any, name: str) -> float | None:
    """A finite number or None; raises ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.60}, not a finite number")
    return float(value)


def read_spans(value: Any, name: str) -> list[tuple[int, int]]:
    """Ranges of windows as (first, one past the last); raises ValueError for anything else."""
    spans = []
    for span in read_list(value, name):
        first, end = (read_count(number, name) for number in read_list(span, name, length=2))
        if first > end:
            raise ValueError(f"{name} ends before it begins: {first} to {end}")
        spans.append((first, end))
    return spans


def read_list(value: Any, name: str, length: int | None = None) -> list[Any]:
    """A list, of the given length if any; raises ValueError for anything else."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{name} is {value!r:.60}, not a list of the expected length")
    return value


def read_dict(value: Any, name: str) -> dict[str, Any]:
    """A dict; raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.60}, not a dict")
    return value
