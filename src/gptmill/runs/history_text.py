"""The life of a run in plain words, a line for each thing that happened."""

from __future__ import annotations

import math
import re
import time
from itertools import groupby
from pathlib import Path

from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event, RolledBack, RunCrashed, RunFinished, RunStarted, UpdateSkipped, Warned
from gptmill.runs.goodput import count, describe_goodput, make_goodput
from gptmill.runs.history import find_crash, read_history

FINGERPRINT_CHARS = 8


def describe_history(run: RunDirectory) -> str:
    """Every start, end, crash, rollback, skipped update and warning, and the run's goodput."""
    entries = read_history(run)
    if not entries:
        return f"run {run.path} has no ledger: it has not begun, or an older gptmill trained it"
    lines = []
    before: RunStarted | None = None
    position = 0
    for _, group in groupby(entries, _make_key):
        same = list(group)
        position += len(same)
        last = same[-1]
        if isinstance(last, RunStarted):
            texts = _describe_start(last, before)
            before = last
        else:
            texts = [_describe(same, entries[position:])]
        lines += [f"{_format_time(same[0].time)}  {text}" for text in texts]
    sign = find_crash(run)
    if sign is not None:
        lines.append(f"{_format_time(sign.time)}  last sign of life, at step {sign.step:,}; no word of its end so far")
    return "\n".join([*lines, describe_goodput(make_goodput(run))])


def _make_key(entry: Event) -> object:
    """Equal for entries that follow each other and say the same; a start or an end is like no other."""
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


def _describe_start(start: RunStarted, before: RunStarted | None) -> list[str]:
    """What a first start began with; of a later one, what is different."""
    if before is None or not start.resumed_from:
        again = " again" if before is not None else ""
        parent = f", from {start.parent}" if start.parent else ""
        prints = {"code": start.code[:FINGERPRINT_CHARS], "data": start.data[:FINGERPRINT_CHARS]}
        shown = [f"{name} {fingerprint}" for name, fingerprint in prints.items() if fingerprint]
        lines = [f"started{again} at step {start.step:,}{parent}: " + ", ".join([*_list_circumstances(start), *shown])]
    else:
        place = f" ({Path(start.resumed_from).name})" if start.resumed_from else ""
        lines = [f"resumed from step {start.step:,}{place}"]
        circumstances = _list_circumstances(start)
        known = _list_circumstances(before) if before is not None else circumstances
        lines += [f"now {new}, before {old}" for old, new in zip(known, circumstances, strict=True) if old != new]
    lines += [f"config changed: {change}" for change in start.changes]
    for name in ("code", "data"):
        old, new = getattr(before, name, ""), getattr(start, name)
        if old and new and old != new:
            lines.append(f"{name} changed since the last start")
    return lines


def _list_circumstances(start: RunStarted) -> list[str]:
    return [
        f"gptmill {start.version}",
        f"torch {start.torch_version}",
        f"{count(start.ranks, 'rank')} on {start.device}",
        start.precision,
    ]


def _describe_rollback(entry: RolledBack) -> str:
    numbers = f"loss {_format_number(entry.loss)}, gradient norm {_format_number(entry.grad_norm)}"
    left_out = ""
    if len(entry.windows) == 2 and entry.windows[1] > entry.windows[0]:
        left_out = f"; windows {entry.windows[0]:,} to {entry.windows[1] - 1:,} are left out"
    return f"went back from step {entry.from_step:,} to {entry.step:,}: {entry.reason or numbers}{left_out}"


def _describe_lost(end: Event, later: list[Event]) -> str:
    """The steps that the next start will not know of."""
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
