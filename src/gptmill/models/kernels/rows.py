"""How the rows of a matrix are divided among programs that each also sum up theirs."""

from __future__ import annotations

import math

PROGRAMS = 128  # for each block of columns: enough to fill a card, few enough to add up their sums in no time
MOST_ROWS = 512


def divide_rows(rows: int, at_once: int) -> tuple[int, int]:
    """The number of programs and the rows of each, a power of two that is a multiple of `at_once`."""
    count = 1 << max(0, math.ceil(rows / PROGRAMS) - 1).bit_length()
    count = min(MOST_ROWS, max(at_once, count))
    return math.ceil(rows / count), count
