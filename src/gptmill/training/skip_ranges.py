"""Skip ranges: the windows that training skips after a loss spike, and the data positions that avoid them.

A range is (first window, one past the last). Whole steps move past a range, on all ranks alike, so that the windows
of step N follow from the ranges and the step sizes alone. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

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
) -> Iterator[int]:
    """Yields the first window of each micro-batch of a rank, endlessly. Later changes to `ranges` have no effect."""
    offset, stride = world_rank * samples_per_batch, world_size * samples_per_batch
    return _walk(merge_ranges(ranges), position, steps_done, plan, offset, stride)


def _walk(
    ranges: list[Range], position: int, steps_done: int, plan: TrainPlan, offset: int, stride: int
) -> Iterator[int]:
    for step in count(steps_done + 1):
        windows = plan.count_windows(step)
        first = find_unskipped(ranges, position, windows)
        for micro_batch in range(plan.count_micro_batches(step)):
            yield first + offset + micro_batch * stride
        position = first + windows


def find_step_windows(ranges: Iterable[Range], sizes: list[int]) -> Range:
    """The windows of the last step, given the sizes of all steps from the start of the run."""
    merged, first, end = merge_ranges(ranges), 0, 0
    for size in sizes:
        first = find_unskipped(merged, end, size)
        end = first + size
    return first, end
