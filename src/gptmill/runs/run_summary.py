"""The summary of one run, from its files alone: how far it got, how well it does, and how it ended."""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from gptmill.config.errors import UserError
from gptmill.config.recipes import read_saved_config
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import iterate_lines, parse_event
from gptmill.runs.events import EvalDone, Event, LastStepMoved, RunFinished, RunStarted, StepLogged
from gptmill.runs.history import END_EVENTS, HISTORY_EVENTS, find_last_activity, read_history, split_processes
from gptmill.runs.run_lock import is_locked

MAX_REMARK_CHARS = 300
RECENT_STEPS = 20  # whose median is the speed

RunState = Literal["running", "finished", "stopped", "crashed", "diverged", "not started", "model only"]


@dataclass(frozen=True)
class RunSummary:
    """What is known of a run; None for what is not."""

    run: RunDirectory
    state: RunState
    step: int = 0
    max_steps: int | None = None
    parameters: int | None = None
    tokens: int | None = None
    """Tokens trained on; an estimate during a batch-size warm-up."""
    train_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None
    """The lowest validation loss."""
    tokens_per_second: float | None = None
    """Median of the last steps."""
    started: float | None = None
    """Time of the first start."""
    seconds: float = 0.0
    """How long processes trained it."""
    size_bytes: int = 0
    """On disk, without what its links lead to."""
    remarks: tuple[str, ...] = ()
    """What is wrong with its files."""

    @property
    def name(self) -> str:
        return self.run.path.name


@dataclass(frozen=True)
class _Progress:
    """What the summary needs of events.jsonl, which may have millions of lines."""

    recent: list[StepLogged]
    evaluations: list[EvalDone]
    lifecycle: list[Event]
    max_steps: int | None = None
    """As the newest process has last planned it."""


def summarize_run(run: RunDirectory) -> RunSummary:
    """Returns the summary of a run, also of a damaged one; raises nothing for whatever its files hold."""
    remarks = _find_remarks(run)
    is_running = is_locked(run)
    try:
        progress = _read_progress(run.events)
    except OSError as error:
        progress = _Progress([], [], [])
        if not isinstance(error, FileNotFoundError):
            remarks.append(f"events.jsonl cannot be read: {error.strerror or error}")
    entries = read_history(run) or progress.lifecycle
    processes = split_processes(entries)
    starts = [entry for entry in entries if isinstance(entry, RunStarted)]
    losses = [event.val_loss for event in progress.evaluations if math.isfinite(event.val_loss)]
    steps, start = progress.recent, starts[-1] if starts else None
    step = steps[-1].step if steps else (start.step if start else 0)
    speeds = [event.tokens_per_second for event in steps if math.isfinite(event.tokens_per_second)]
    return RunSummary(
        run,
        find_state(run, processes, is_running=is_running),
        step,
        max_steps=progress.max_steps or (start.max_steps if start else None),
        parameters=start.parameters if start else None,
        tokens=_count_tokens(start, step) if start else None,
        train_loss=steps[-1].loss if steps else None,
        val_loss=progress.evaluations[-1].val_loss if progress.evaluations else None,
        best_loss=min(losses, default=None),
        tokens_per_second=median(speeds) if speeds else None,
        started=starts[0].time if starts else None,
        seconds=_measure_seconds(run, processes),
        size_bytes=measure_tree(run.path),
        remarks=tuple(remarks),
    )


def measure_tree(folder: Path) -> int:
    """Returns the bytes of all files below a folder; links count as themselves, and what vanishes as nothing."""
    total = 0
    for path, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(path) / name).lstat().st_size
            except OSError:
                continue
    return total


def _find_remarks(run: RunDirectory) -> list[str]:
    if not run.config.is_file():
        return ["it has no config.toml"]
    try:
        read_saved_config(run.config)
    except UserError as error:
        return [" ".join(f"config.toml is damaged: {error}".split())[:MAX_REMARK_CHARS]]
    return []


def _read_progress(path: Path) -> _Progress:
    """Reads line by line, and parses only what is needed: most lines are steps, of which the last few count."""
    recent: deque[bytes] = deque(maxlen=RECENT_STEPS)
    others: list[Event | None] = []
    for line in iterate_lines(path):
        if b'"StepLogged"' in line[:50]:
            recent.append(line)
        elif b'"SampleDrawn"' not in line[:50]:
            others.append(parse_event(line.decode(errors="replace")))
    steps = [parse_event(line.decode(errors="replace")) for line in recent]
    last_steps = [event.max_steps for event in others if isinstance(event, RunStarted | LastStepMoved)]
    return _Progress(
        [event for event in steps if isinstance(event, StepLogged)],
        [event for event in others if isinstance(event, EvalDone)],
        [event for event in others if isinstance(event, HISTORY_EVENTS)],
        last_steps[-1] if last_steps else None,
    )


def find_state(run: RunDirectory, processes: list[list[Event]], *, is_running: bool) -> RunState:
    """Returns how the last process ended, or that one is running."""
    if is_running:
        return "running"
    if not processes:
        return "model only" if run.checkpoints.is_dir() and run.has_checkpoints else "not started"
    end = processes[-1][-1]
    if not isinstance(end, RunFinished):
        return "crashed"  # recorded, or without a record
    if end.reason.startswith("gave up"):
        return "diverged"
    return "finished" if end.reason.startswith(("finished", "stopped early")) else "stopped"


def _measure_seconds(run: RunDirectory, processes: list[list[Event]]) -> float:
    ends = [process[-1].time for process in processes]
    if processes and not isinstance(processes[-1][-1], END_EVENTS):
        ends[-1] = max(ends[-1], find_last_activity(run).time)
    return sum(max(0.0, end - process[0].time) for process, end in zip(processes, ends, strict=True))


def _count_tokens(start: RunStarted, step: int) -> int:
    if start.total_tokens and step == start.max_steps:
        return start.total_tokens
    return step * start.tokens_per_step
