"""Positions jump over what is left out, alike on all ranks and whenever it is computed again."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count, islice, pairwise
from pathlib import Path

import pytest
from tiny import make_config, make_shards, plan_for

from gptmill.training.plan import TrainPlan
from gptmill.training.skip_ranges import add_skip_range, find_step_windows, find_unskipped, make_starts, merge_ranges


@pytest.fixture
def plan(text_file: Path) -> TrainPlan:
    """Two micro-batches of four windows."""
    return plan_for(make_config(), make_shards(text_file))


@pytest.mark.parametrize(
    ("ranges", "position", "expected"),
    [
        ([], 8, 8),
        ([(16, 24)], 8, 8),  # begins where the step ends
        ([(0, 8)], 8, 8),  # ends where the step begins
        ([(15, 24)], 8, 24),
        ([(0, 9)], 8, 9),
        ([(10, 11)], 8, 11),
        ([(0, 99)], 8, 99),
        ([(16, 24), (8, 16)], 8, 24),
        ([(8, 16), (20, 30)], 8, 30),  # between the two is no room for a step
        ([(8, 16), (24, 30)], 8, 16),
        ([(10, 10)], 8, 8),  # nothing
    ],
)
def test_a_step_meets_nothing_that_is_left_out(ranges: list[tuple[int, int]], position: int, expected: int) -> None:
    assert find_unskipped(ranges, position, 8) == expected


def test_a_jump_is_the_shortest_one() -> None:
    generator = random.Random(0)
    for _ in range(500):
        ranges = [(first, first + generator.randrange(9)) for first in generator.choices(range(40), k=4)]
        left_out = {window for first, end in ranges for window in range(first, end)}
        position, size = generator.randrange(40), generator.randrange(1, 9)
        expected = next(place for place in count(position) if left_out.isdisjoint(range(place, place + size)))
        assert find_unskipped(ranges, position, size) == expected
        merged = merge_ranges(ranges)
        assert {window for first, end in merged for window in range(first, end)} == left_out
        assert all(before[1] < after[0] for before, after in pairwise(merged))


def test_going_back_leaves_out_what_lies_ahead_alone() -> None:
    assert add_skip_range([(40, 48)], (16, 32), 8) == [(16, 32), (40, 48)]
    assert add_skip_range([(40, 48)], (16, 40), 24) == [(24, 48)]
    assert add_skip_range([], (16, 24), 24) == []


@pytest.mark.parametrize(("size", "units"), [(1, 4), (2, 2), (4, 1)])
def test_the_starts_of_all_ranks_are_those_of_one(plan: TrainPlan, size: int, units: int) -> None:
    plan = replace(plan, micro_batches=8 // (size * units))
    for rank in range(size):
        straight = make_starts([], 16, 0, plan, rank, size, units)
        assert list(islice(straight, 20)) == list(islice(count(16 + rank * units, size * units), 20))
    ranges = [(24, 32), (50, 51)]
    starts = [make_starts(ranges, 16, 0, plan, rank, size, units) for rank in range(size)]
    ranges.clear()  # a feed reads ahead in a thread of its own
    for first in (16, 32, 40, 51, 59):
        firsts = [next(rank_starts) for _ in range(plan.micro_batches) for rank_starts in starts]
        assert firsts == list(range(first, first + 8, units))


def test_the_windows_of_a_step_are_found_again() -> None:
    ranges, sizes = [(24, 32), (50, 51)], [8, 8, 8, 8, 16, 16]
    found = [find_step_windows(ranges, sizes[:steps]) for steps in range(1, 7)]
    assert found == [(0, 8), (8, 16), (16, 24), (32, 40), (51, 67), (67, 83)]
    assert find_step_windows([], sizes) == (48, 64)
