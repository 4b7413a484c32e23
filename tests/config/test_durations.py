"""Durations as people and schedulers write them."""

from __future__ import annotations

import pytest

from gptmill.config.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h50m", 13_800),
        ("45m", 2_700),
        ("90s", 90),
        ("1d2h", 93_600),
        ("1.5s", 1.5),
        ("3H 50M", 13_800),
        ("3:50:00", 13_800),
        ("1-02:00:00", 93_600),
        ("100:00:01", 360_001),
    ],
)
def test_a_duration_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "h", "3x", "50m3h", "3h3h", "-3h", "1:99:00", "1e3s", "٣h", "3h50", "none"])
def test_invalid_durations_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 3h50m"):
        parse_duration(text)


def test_a_bare_number_is_asked_for_its_unit() -> None:
    with pytest.raises(ValueError, match="write 90s, 90m or 90h"):
        parse_duration("90")


def test_hours_and_minutes_cannot_be_mistaken_for_minutes_and_seconds() -> None:
    with pytest.raises(ValueError, match="write 3h50m or 3m50s"):
        parse_duration("3:50")


@pytest.mark.parametrize("text", ["0s", "0h0m", "0:00:00"])
def test_a_duration_of_zero_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="longer than zero"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [1, 59, 60, 3_600, 13_800, 86_400, 93_784, 10_000_000])
def test_a_formatted_duration_parses_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_units_of_zero_are_omitted() -> None:
    assert [format_duration(seconds) for seconds in (13_800, 0.2, -1, 59.6)] == ["3h50m", "0s", "0s", "1m"]
