"""A rank that keeps the others waiting is named once, until it recovers; one that stumbles is not."""

from __future__ import annotations

import pytest
import torch
from steps import make_step, show

from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training.straggler_check import BusyTimer, StragglerCheck

FAST = 0.1


def see(levels: list[tuple[float, int]], num_ranks: int = 4) -> list[str]:
    """The warnings of steps of two seconds, of which the last rank's own part takes so long, so many times."""
    steps = [seconds for seconds, count in levels for _ in range(count)]
    busy = {f"rank {rank} on node{rank}": FAST for rank in range(num_ranks - 1)}
    times = iter(steps[3:])  # a monitor shows no check the first three steps
    check = StragglerCheck(1.3, lambda: {**busy, "rank 9 on node9": next(times)})
    return [warning.message for warning in show(check, [make_step(step, 0.5) for step in range(1, len(steps) + 1)])]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_straggler_is_named_once_until_it_recovers(num_ranks: int) -> None:
    slow = (2 * FAST, 400)
    (first,) = see([(FAST, 20), slow], num_ranks)
    assert "rank 9 on node9 is a straggler: its own part of a step takes 200 ms, 2.0 times the 100 ms" in first
    assert len(see([slow, (FAST, 1200), slow], num_ranks)) == 2
    assert len(see([slow, (1.25 * FAST, 1200), slow], num_ranks)) == 1  # not yet fine in between


def test_what_is_brief_or_small_or_alone_is_no_straggler() -> None:
    assert see([(FAST, 50), (5 * FAST, 20), (FAST, 50), (5 * FAST, 20), (FAST, 50)]) == []
    assert see([(1.2 * FAST, 300)]) == []
    assert see([(0.0, 300)]) == []  # not known yet
    assert see([(9 * FAST, 300)], num_ranks=1) == []
    long_steps = [make_step(step, 600.0) for step in range(1, 50)]
    assert show(StragglerCheck(1.3, lambda: {"rank 0 on a": 1.0, "rank 1 on b": 9.0}), long_steps) == []


def test_a_rank_s_own_part_of_a_step_ends_with_its_last_backward_pass() -> None:
    device, timer = torch.device("cpu"), BusyTimer(torch.device("cpu"))
    assert timer.median_seconds == 0.0
    for seconds in (1.0, 2.0, 3.0, 4.0):
        started = DeviceTimestamp(device)
        timer.mark()
        timer.mark()
        assert timer._mark is not None
        timer._mark._host_seconds = started._host_seconds + seconds
        timer.add(started)
    assert timer.median_seconds == pytest.approx(2.0)  # the last step is read one step late
