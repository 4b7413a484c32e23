"""Reads event logs: events.jsonl and ledger.jsonl, one JSON object per line, possibly still growing.

The last line may be incomplete: it is being written, or a kill cut it short. It is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptmill.config.json_text import parse_json
from gptmill.config.regular_files import measure_regular, open_regular
from gptmill.runs.event_json import from_json
from gptmill.runs.events import Event, StepLogged

TAIL_BYTES = 1 << 16
REPORTED_LINES = 1000
MAX_LINE_BYTES = 16 << 20


def read_events(path: Path, *, missing_ok: bool = False) -> list[Event]:
    """Returns every event, skipping lines that are not valid events of this version.

    Raises OSError if the file cannot be read, unless `missing_ok`: then there are no events.
    """
    return _parse_lines(_read_lines(path, missing_ok=missing_ok))


def iterate_events(path: Path, report: Callable[[int, int], None] | None = None) -> Iterator[Event]:
    """Yields what `read_events` returns, one by one, for logs of millions of lines.

    Reports the bytes read, and how many there are. Raises OSError if the file cannot be read.
    """
    size, position = measure_regular(path), 0
    for number, line in enumerate(iterate_lines(path)):
        position += len(line)
        if (event := parse_event(line.decode(errors="replace"))) is not None:
            yield event
        if report is not None and number % REPORTED_LINES == 0:
            report(min(position, size), size)


def iterate_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines, up to one that is longer than any event: the file is damaged from there on, maybe without end.

    Raises OSError if the file cannot be read.
    """
    with open_regular(path) as file:
        while 0 < len(line := file.readline(MAX_LINE_BYTES + 1)) <= MAX_LINE_BYTES:
            yield line


def read_recent_events(path: Path) -> list[Event]:
    """Returns the events in the last 64 KiB, or all events where those hold none; none if there is no file."""
    tail = _read_lines(path, TAIL_BYTES, missing_ok=True)
    return _parse_lines(tail) or read_events(path, missing_ok=True)


def read_last_step(path: Path) -> int:
    """Returns the step logged last; 0 before the first, or without a file. Cheap enough to poll a growing file."""
    for last_bytes in (TAIL_BYTES, None):
        for line in reversed(_read_lines(path, last_bytes, missing_ok=True)):
            event = parse_event(line)
            if isinstance(event, StepLogged):
                return event.step
    return 0


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns every line as it was written, with events and fields that this version does not know.

    Raises OSError if the file cannot be read, and ValueError for a line that is not JSON.
    """
    return [parse_json(line) for line in _read_lines(path) if line.endswith("\n")]


def parse_event(line: str) -> Event | None:
    """Returns the event of a line; None if it is not a valid event, or of a kind that a newer version added."""
    try:
        return from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _parse_lines(lines: list[str]) -> list[Event]:
    return [event for line in lines if (event := parse_event(line)) is not None]


def _read_lines(path: Path, last_bytes: int | None = None, *, missing_ok: bool = False) -> list[str]:
    """Returns the lines, or those in the last so many bytes, of which the first may lack its start."""
    try:
        if last_bytes is None:
            return [line.decode(errors="replace") for line in iterate_lines(path)]
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - last_bytes))
            return file.read(last_bytes).decode(errors="replace").split("\n")
    except OSError:
        if missing_ok:
            return []
        raise
