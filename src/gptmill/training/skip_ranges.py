"""Skip ranges: the windows that training skips after a loss spike, and the data positions that avoid them.

A range is (first window, one past the last). Whole steps move past a range, on all ranks alike, so that the windows
of step N follow from the ranges and the step sizes alone. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from gptmill.training.exact_sum import list_numbers
from gptmill.training.plan import TrainPlan

Range = tuple[int, int]


def find_unskipped(ranges: Iterable[Range], position: int, size: int) -> int:
    """The first position at or after `position` where a step of `size` windows overlaps none of the ranges."""
    for first, end in merge_ranges(ranges):
        if first < position + size and position < end:
            position = end
    return position


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Sorts the ranges and joins those that touch or overlap."""
    merged: list[Range] = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((first, end))
    return merged


def add_skip_range(ranges: Iterable[Range], windows: Range, position: int) -> list[Range]:
    """Adds `windows` to the skip ranges of a run that has rolled back to `position`.

    Windows before `position` are not added: they were read, and replaying the steps must find them again.
    """
    return merge_ranges([*ranges, (max(windows[0], position), windows[1])])


def make_starts(
    ranges: Iterable[Range],
    position: int,
    steps_done: int,
    plan: TrainPlan,
    world_rank: int,
    world_size: int,
    samples_per_batch: int,
    *,
    is_exact: bool = False,
) -> Iterator[int]:
    """Yields the first window of each micro-batch of a rank, endlessly. Later changes to `ranges` have no effect."""
    merged = merge_ranges(ranges)  # here, since a generator's code runs later

    def walk(position: int) -> Iterator[int]:
        for step in count(steps_done + 1):
            windows = plan.count_windows(step)
            first = find_unskipped(merged, position, windows)
            for number in list_numbers(plan.count_micro_batches(step), world_rank, world_size, is_exact=is_exact):
                yield first + number * samples_per_batch
            position = first + windows

    return walk(position)


def find_step_windows(ranges: Iterable[Range], sizes: list[int]) -> Range:
    """The windows of the last step, given the sizes of all steps from the start of the run."""
    merged, first, end = merge_ranges(ranges), 0, 0
    for size in sizes:
        first = find_unskipped(merged, end, size)
        end = first + size
    return first, end
