"""Alarms sound once per incident, and not often."""

from __future__ import annotations

import pytest

from gptmill.training.alarm import MIN_USUAL_STEPS, REPEAT_SECONDS, Alarm, Recent, Usual


def sound(alarm: Alarm, states: str, seconds: float) -> str:
    """The moments at which it sounds; b is bad, f is fine, - is neither."""
    sounds = [
        alarm.check(is_bad=state == "b", is_fine=state == "f", time=number * seconds)
        for number, state in enumerate(states)
    ]
    return "".join("x" if sounded else "." for sounded in sounds)


@pytest.mark.parametrize(
    ("states", "sounds"),
    [
        ("fffbbbbb", "...x...."),
        ("bb--bb--", "x......."),
        ("bbffbbff", "x...x..."),
        ("ff--ff--", "........"),
    ],
)
def test_an_alarm_sounds_again_after_it_was_fine(states: str, sounds: str) -> None:
    assert sound(Alarm(), states, REPEAT_SECONDS) == sounds


def test_an_alarm_that_comes_and_goes_sounds_rarely_and_is_not_lost() -> None:
    assert sound(Alarm(), "bfbfbfbfbfbfbfbfbfbfbf", REPEAT_SECONDS / 10) == "x.........x.........x."
    assert sound(Alarm(), "bfbbbbbbbbbbbbb", REPEAT_SECONDS / 10) == "x.........x...."


def test_recent_values_make_up_some_steps_and_some_seconds() -> None:
    recent = Recent(min_steps=3, min_seconds=10.0)
    for value in range(5):
        assert recent.add(float(value), 2.0) == []
        assert recent.is_full == (value == 4)
    assert recent.add(5.0, 2.0) == [(0.0, 2.0)]
    assert (recent.average(), recent.find_median(), recent.seconds) == (3.0, 3.0, 10.0)
    assert recent.add(9.0, 90.0) == [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]
    assert recent.average() == pytest.approx((8 + 10 + 810) / 94)


def test_short_steps_are_merged_and_weigh_as_much_as_they_last() -> None:
    recent = Recent(min_steps=3, min_seconds=30.0)
    gone = [leaving for step in range(10_000) for leaving in recent.add(float(step < 5_000), 0.01)]
    assert recent.is_full
    assert recent.seconds == pytest.approx(30, abs=2)
    assert sum(seconds for _, seconds in gone) == pytest.approx(70, abs=2)
    assert len(gone) < 100
    assert recent.average() == recent.find_median() == 0
    assert sum(value * seconds for value, seconds in gone) == pytest.approx(50)


def test_what_is_usual_is_known_after_a_while() -> None:
    usual = Usual(min_seconds=60.0)
    usual.add([(1.0, 1.0)] * (MIN_USUAL_STEPS - 1))
    assert usual.level is None
    usual.add([(9.0, 1.0)])
    assert usual.level is None
    usual.add([(2.0, 60.0)])
    assert usual.level == 1.0
    usual.clear()
    assert usual.level is None
