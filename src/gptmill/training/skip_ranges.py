"""Data that a run leaves out: ranges of window numbers, and the positions that jump over them. Pure functions.

A range is (first window, the one after the last). Positions jump in whole steps, and all ranks jump alike, so that
which windows step N read follows from the ranges and the sizes of the steps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from gptmill.training.plan import TrainPlan

Range = tuple[int, int]


def find_unskipped(ranges: Iterable[Range], position: int, size: int) -> int:
    """The first position from `position` on at which a step of `size` windows meets none of the ranges."""
    for first, end in merge_ranges(ranges):
        if first < position + size and position < end:
            position = end
    return position


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The same windows in order, as few ranges as can be."""
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
    """The ranges of a run that went back to `position` and is to leave out `windows` from there on.

    What lies before stays as it was read: otherwise replaying the jumps would move steps that are done.
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
    """The first window of each of a rank's micro-batches, without end. Later changes to `ranges` are not seen."""
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
    """The windows of the last of the steps with these sizes, counted from the start of a run."""
    merged, first, end = merge_ranges(ranges), 0, 0
    for size in sizes:
        first = find_unskipped(merged, end, size)
        end = first + size
    return first, end
