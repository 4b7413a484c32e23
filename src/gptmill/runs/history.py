"""ledger.jsonl: the run history, from every start to every end. Append-only, while a resumed run truncates its logs.

Does not import torch, so that the supervisor can write to it too.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gptmill.config.json_text import read_json
from gptmill.runs.append_file import AppendOnlyFile
from gptmill.runs.crash_files import find_crash_sentence
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import MAX_TIME, to_json
from gptmill.runs.event_log import read_events, read_recent_events
from gptmill.runs.events import Event, RolledBack, RunCrashed, RunFinished, RunStarted, UpdateSkipped, Warned

HISTORY_EVENTS = (RunStarted, RunFinished, RunCrashed, UpdateSkipped, RolledBack, Warned)
END_EVENTS = (RunFinished, RunCrashed)
UNKNOWN_REASON = "the process ended without reporting a reason"


def read_history(run: RunDirectory) -> list[Event]:
    """Returns every entry, oldest first."""
    return [event for event in read_events(run.history, missing_ok=True) if isinstance(event, HISTORY_EVENTS)]


def split_processes(entries: list[Event]) -> list[list[Event]]:
    """Returns the entries of each process, from its start to its end, if that is recorded."""
    processes: list[list[Event]] = []
    for entry in entries:
        if isinstance(entry, RunStarted):
            processes.append([entry])
        elif processes and not isinstance(processes[-1][-1], END_EVENTS):
            processes[-1].append(entry)
    return processes


def append_event(run: RunDirectory, event: Event) -> None:
    """Appends an entry and flushes it to disk; if the disk refuses it for good, prints a warning."""
    file = AppendOnlyFile(run.history, durable=True)
    try:
        file.keep_only(lambda _line: True)  # drops a line that a kill cut short
        file.write_line(to_json(event))
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"warning: {run.history} lacks an entry: {error.strerror or error}\n")
    finally:
        file.close()


def find_crash(run: RunDirectory) -> RunCrashed | None:
    """Returns the end of the newest process if it was not recorded. Call it before events.jsonl is truncated."""
    processes = split_processes(read_history(run))
    if not processes or isinstance(processes[-1][-1], END_EVENTS):
        return None
    crash = find_last_activity(run)
    reason = find_crash_sentence(run, processes[-1][0].time) or crash.reason
    return replace(crash, reason=reason, time=max(crash.time, processes[-1][-1].time))


def record_crash(run: RunDirectory) -> None:
    """Records the end of a process that could not do so itself."""
    crash = find_crash(run)
    if crash is not None:
        append_event(run, crash)


def find_last_activity(run: RunDirectory) -> RunCrashed:
    """Returns the last step and the last time that events and heartbeats tell of, as a crash at that moment."""
    events = read_recent_events(run.events)
    times = [event.time for event in events] + [_read_heartbeat(path) for path in run.heartbeat.glob("rank_*.json")]
    step = max((event.step for event in events), default=0)
    return RunCrashed(step, UNKNOWN_REASON, time=max(times, default=0.0))


def _read_heartbeat(path: Path) -> float:
    try:
        moment = float(read_json(path)["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0.0
    return moment if 0 <= moment < MAX_TIME else 0.0
