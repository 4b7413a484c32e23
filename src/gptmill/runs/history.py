"""ledger.jsonl: the life of a run, start by start. It is only ever added to, while a resumed run cuts its logs back.

Needs no torch, so that whoever watches over a run can write in it too.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import (
    Event,
    RolledBack,
    RunCrashed,
    RunFinished,
    RunStarted,
    UpdateSkipped,
    Warned,
    from_json,
    to_json,
)

KEPT = (RunStarted, RunFinished, RunCrashed, UpdateSkipped, RolledBack, Warned)
ENDS = (RunFinished, RunCrashed)
WITHOUT_A_WORD = "the process ended without a word"
TAIL_BYTES = 1 << 16


def read_history(run: RunDirectory) -> list[Event]:
    """Every entry, oldest first; lines that are none are left out."""
    return read_event_lines(run.ledger)


def read_event_lines(path: Path, last_bytes: int | None = None) -> list[Event]:
    """The events of a file of JSON lines, or those in its last so many bytes; none where there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - last_bytes) if last_bytes is not None else 0)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    events = (_parse(line) for line in text.split("\n"))
    return [event for event in events if event is not None]


def split_processes(entries: list[Event]) -> list[list[Event]]:
    """The entries of each process, from its start to the last word about it."""
    processes: list[list[Event]] = []
    for entry in entries:
        if isinstance(entry, RunStarted):
            processes.append([entry])
        elif processes and not isinstance(processes[-1][-1], ENDS):
            processes[-1].append(entry)
    return processes


def append_event(run: RunDirectory, event: Event) -> None:
    """Adds an entry, which is on the disk when this returns; a disk that refuses is told of, and does no more harm."""
    try:
        with run.ledger.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")  # ends a line that a kill cut short
            file.write(to_json(event).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"warning: {run.ledger} lacks an entry: {error.strerror or error}\n")


def find_crash(run: RunDirectory) -> RunCrashed | None:
    """The end of the newest process, if it left no word of it. Ask before events.jsonl is cut back."""
    processes = split_processes(read_history(run))
    if not processes or isinstance(processes[-1][-1], ENDS):
        return None
    sign = find_last_sign(run)
    return replace(sign, time=max(sign.time, processes[-1][-1].time))


def record_crash(run: RunDirectory) -> None:
    """Writes down the end of a process that could not do so itself."""
    crash = find_crash(run)
    if crash is not None:
        append_event(run, crash)


def find_last_sign(run: RunDirectory) -> RunCrashed:
    """The furthest step that the run's events tell of, and when it was last seen alive."""
    events = read_event_lines(run.events, TAIL_BYTES) or read_event_lines(run.events)
    times = [event.time for event in events] + [_read_heartbeat(path) for path in run.heartbeat.glob("rank_*.json")]
    step = max((event.step for event in events), default=0)
    return RunCrashed(step, WITHOUT_A_WORD, time=max(times, default=0.0))


def _read_heartbeat(path: Path) -> float:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _parse(line: str) -> Event | None:
    try:
        event = from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_sound = event is not None and isinstance(event.step, int) and isinstance(event.time, int | float)
    return event if is_sound else None
