"""The run history as text, one line per entry."""

from __future__ import annotations

import math
import re
import time
from itertools import groupby
from pathlib import Path

from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import shorten_checksum
from gptmill.runs.events import Event, RolledBack, RunCrashed, RunFinished, RunStarted, UpdateSkipped, Warned
from gptmill.runs.goodput import count, describe_goodput, make_goodput
from gptmill.runs.history import find_crash, read_history

FINGERPRINT_CHARS = 8


def describe_history(run: RunDirectory) -> str:
    """Describes every start, end, crash, rollback, skipped update and warning, and the run's goodput."""
    entries = read_history(run)
    if not entries:
        return f"run {run.path} has no history: it has not started, or an older gptmill trained it"
    lines = [f"{_format_time(entry.time)}  {text}" for entry, text in describe_entries(entries)]
    crash = find_crash(run)
    if crash is not None:
        lines.append(f"{_format_time(crash.time)}  last activity, at step {crash.step:,}; no end recorded yet")
    return "\n".join([*lines, describe_goodput(make_goodput(run))])


def describe_entries(entries: list[Event]) -> list[tuple[Event, str]]:
    """Describes entries in sentences, each with the first entry that it is about."""
    described: list[tuple[Event, str]] = []
    previous: RunStarted | None = None
    position = 0
    for _, group in groupby(entries, _make_key):
        same = list(group)
        position += len(same)
        last = same[-1]
        if isinstance(last, RunStarted):
            texts = _describe_start(last, previous)
            previous = last
        else:
            texts = [_describe(same, entries[position:])]
        described += [(same[0], text) for text in texts]
    return described


def _make_key(entry: Event) -> object:
    """Returns a key that is equal for entries to be merged into one line; starts and ends are never merged."""
    if isinstance(entry, UpdateSkipped):
        return UpdateSkipped
    if isinstance(entry, Warned):
        return entry.about, re.sub(r"[0-9.,]+", "0", entry.message)
    return id(entry)


def _describe(same: list[Event], later: list[Event]) -> str:
    entry, steps = same[0], f"steps {same[0].step:,} to {same[-1].step:,}"
    if isinstance(entry, UpdateSkipped):
        if len(same) > 1:
            return f"{len(same):,} updates skipped, {steps}"
        numbers = f"loss {_format_number(entry.loss)}, gradient norm {_format_number(entry.grad_norm)}"
        return f"update of step {entry.step:,} skipped: {numbers}"
    if isinstance(entry, Warned):
        return f"warning: {entry.message}" + (f" ({len(same):,} times, {steps})" if len(same) > 1 else "")
    if isinstance(entry, RolledBack):
        return _describe_rollback(entry)
    if isinstance(entry, RunCrashed):
        return f"crashed at step {entry.step:,}: {entry.reason}" + _describe_lost(entry, later)
    assert isinstance(entry, RunFinished)
    how, _, why = entry.reason.partition(": ")
    return f"{how} at step {entry.step:,}" + (f": {why}" if why else "") + _describe_lost(entry, later)


def _describe_start(start: RunStarted, previous: RunStarted | None) -> list[str]:
    """Describes the environment of a first start; of a later one, what changed."""
    if previous is None or not start.resumed_from:
        again = " again" if previous is not None else ""
        parent = f", from {shorten_checksum(start.parent)}" if start.parent else ""
        prints = {"code": start.code[:FINGERPRINT_CHARS], "data": start.data[:FINGERPRINT_CHARS]}
        shown = [f"{name} {fingerprint}" for name, fingerprint in prints.items() if fingerprint]
        lines = [f"started{again} at step {start.step:,}{parent}: " + ", ".join([*_list_environment(start), *shown])]
    else:
        checkpoint = f" ({Path(start.resumed_from).name})" if start.resumed_from else ""
        lines = [f"resumed from step {start.step:,}{checkpoint}"]
        environments = zip(_list_environment(previous), _list_environment(start), strict=True)
        lines += [f"now {new}, before {old}" for old, new in environments if old != new]
    lines += [f"config changed: {change}" for change in start.changes]
    for name in ("code", "data"):
        old, new = getattr(previous, name, ""), getattr(start, name)
        if old and new and old != new:
            lines.append(f"{name} changed since the last start")
    return lines


def _list_environment(start: RunStarted) -> list[str]:
    return [
        f"gptmill {start.version}",
        f"torch {start.torch_version}",
        f"{count(start.ranks, 'rank')} on {start.device}",
        start.precision,
    ]


def _describe_rollback(entry: RolledBack) -> str:
    numbers = f"loss {_format_number(entry.loss)}, gradient norm {_format_number(entry.grad_norm)}"
    skipped = ""
    if len(entry.windows) == 2 and entry.windows[1] > entry.windows[0]:
        skipped = f"; windows {entry.windows[0]:,} to {entry.windows[1] - 1:,} are skipped"
    return f"rolled back from step {entry.from_step:,} to {entry.step:,}: {entry.reason or numbers}{skipped}"


def _describe_lost(end: Event, later: list[Event]) -> str:
    """Describes the steps after the checkpoint that the next start resumed from."""
    start = next((entry for entry in later if isinstance(entry, RunStarted)), None)
    if start is None or start.step >= end.step:
        return ""
    if end.step - start.step == 1:
        return f"; step {end.step:,} was lost"
    return f"; steps {start.step + 1:,} to {end.step:,} were lost"


def _format_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _format_number(number: float) -> str:
    return f"{number:.4g}" if math.isfinite(number) else "not finite"
