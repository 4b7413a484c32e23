"""Durations as text: 3h50m, or in the format of job schedulers, 3:50:00 and 1-02:00:00."""

from __future__ import annotations

import re

UNIT_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
WITH_UNITS = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9}(?:\.\d{1,3})?)s)?", re.ASCII)
CLOCK = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]\d):([0-5]\d)", re.ASCII)
BARE_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
AMBIGUOUS_CLOCK = re.compile(r"(\d{1,6}):([0-5]\d)", re.ASCII)


def parse_duration(text: str) -> float:
    """The duration in seconds; raises ValueError with what is wrong."""
    plain = "".join(text.split()).lower()
    if BARE_NUMBER.fullmatch(plain):
        raise ValueError(f"has no unit; write {plain}s, {plain}m or {plain}h")
    if ambiguous := AMBIGUOUS_CLOCK.fullmatch(plain):
        first, second = ambiguous.groups()
        raise ValueError(f"is ambiguous; write {first}h{second}m or {first}m{second}s")
    found = WITH_UNITS.fullmatch(plain) or CLOCK.fullmatch(plain)
    if not plain or found is None:
        raise ValueError("must be a duration such as 3h50m, 45m, 90s, 1d2h or 3:50:00")
    amounts = zip(found.groups(), UNIT_SECONDS.values(), strict=True)
    seconds = sum(float(amount or 0) * unit for amount, unit in amounts)
    if not seconds:
        raise ValueError("must be longer than zero")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back as that many whole seconds; 0s for zero."""
    left, parts = max(0, round(seconds)), []
    for unit, size in UNIT_SECONDS.items():
        amount, left = divmod(left, size)
        parts.append(f"{amount}{unit}" if amount else "")
    return "".join(parts) or "0s"
