"""How the rows of a matrix are divided among programs that each also sum up theirs."""

from __future__ import annotations

PROGRAMS = 128  # for each block of columns: enough to fill a card, few enough to add up their sums in no time
MOST_ROWS = 512


def make_launch_grid(rows: int, at_once: int) -> tuple[int, int]:
    """The number of programs and the rows of each, a power of two that is a multiple of `at_once`."""
    count = at_once
    while count < MOST_ROWS and count * PROGRAMS < rows:
        count *= 2
    return (rows + count - 1) // count, count
