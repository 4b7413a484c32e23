"""Pacing: the last step moves with the speed of the machine, so that a run ends before its deadline."""

from __future__ import annotations

import pytest

from gptmill.training.pacing import MIN_STEPS, Pacer


def run_steps(pacer: Pacer, steps: int, seconds: float, start: float = 0.0) -> float:
    """Returns the time after the last step."""
    for number in range(steps + 1):
        pacer.note_step(start + number * seconds)
    return start + steps * seconds


@pytest.mark.parametrize(
    ("step_seconds", "may_extend", "expected"),
    [
        pytest.param(1.0, True, 100, id="as planned"),
        pytest.param(2.0, True, 20 + int(0.99 * 60 / 2), id="slower: shortened"),
        pytest.param(2.0, False, 20 + int(0.99 * 60 / 2), id="slower in the decay: shortened too"),
        pytest.param(0.8, True, 20 + int(0.99 * 84 / 0.8), id="faster: extended"),
        pytest.param(1.03, True, 100, id="hardly slower: as planned"),
        pytest.param(0.8, False, 100, id="faster in the decay: as planned"),
        pytest.param(0.1, True, 150, id="much faster: extended by half at most"),
    ],
)
def test_the_last_step_follows_the_pace(step_seconds: float, may_extend: bool, expected: int) -> None:
    pacer = Pacer(deadline=103.0)
    pacer.note_pause(2.0)
    run_steps(pacer, 20, step_seconds)
    assert pacer.find_max_steps(20, 100, margin_seconds=0.0, may_extend=may_extend) == expected


def test_a_run_that_would_overfit_is_not_extended() -> None:
    for most_steps, expected in ((100, 100), (110, 110), (80, 100)):
        pacer = Pacer(deadline=103.0, most_steps=most_steps)
        run_steps(pacer, 30, 0.5)
        assert pacer.find_max_steps(30, 100, margin_seconds=0.0, may_extend=True) == expected


def test_the_last_evaluation_and_the_margin_are_left_free() -> None:
    pacer = Pacer(deadline=100.0)
    now = run_steps(pacer, 30, 1.0)
    pacer.note_pause(10.0)
    last = pacer.find_max_steps(30, 100, margin_seconds=5.0, may_extend=True)
    assert now + (last - 30) * 1.0 <= 100.0 - 5.0 - 1.5 * 10.0
    assert last >= 70


def test_without_a_known_pace_or_after_a_rollback_nothing_moves() -> None:
    pacer = Pacer(deadline=10.0)
    run_steps(pacer, MIN_STEPS - 1, 5.0)
    assert pacer.find_max_steps(19, 100, 0.0, may_extend=True) == 100
    run_steps(pacer, 20, 5.0)
    pacer.forget()
    assert pacer.find_max_steps(27, 100, 0.0, may_extend=True) == 100


def test_a_speed_that_swings_is_warned_of_once_until_the_plan_is_kept_again() -> None:
    pacer = Pacer(deadline=2000.0)
    warned = []
    for number, (before, after) in enumerate([(100, 99), (99, 70), (70, 85), (85, 60), (60, 98), (98, 70)]):
        pacer.note_step(1000.0 * number)
        if pacer.is_worth_a_warning(before, after):
            warned.append((before, after))
    assert warned == [(99, 70), (98, 70)]


def test_past_the_deadline_one_step_remains() -> None:
    pacer = Pacer(deadline=10.0)
    run_steps(pacer, 20, 1.0)
    assert pacer.find_max_steps(20, 100, 3.0, may_extend=True) == 21
