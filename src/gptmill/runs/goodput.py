"""Goodput: how much of a run's time went into steps that are still part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import EvalDone, Event, RolledBack, StepLogged, UpdateSkipped
from gptmill.runs.history import find_crash, read_event_lines, read_history, split_processes


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, as far as its files tell."""

    wall_seconds: float
    """From the first start to the last sign of life."""
    running_seconds: float
    """Of that, with a process at work."""
    kept_seconds: float
    """Of that, in steps that were not lost."""
    evaluation_seconds: float
    """Of the running time, in evaluations that were not lost."""
    lost_steps: int
    """Steps that a later start or a rollback went back behind."""
    restarts: int
    rollbacks: int
    skipped: int
    """Updates left out because they were not finite."""

    @property
    def share_of_running(self) -> float:
        return self.kept_seconds / self.running_seconds if self.running_seconds > 0 else 0.0

    @property
    def share_of_wall(self) -> float:
        return self.kept_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def make_goodput(run: RunDirectory) -> Goodput:
    """From the ledger, which has every start, and the events, which have every kept step once."""
    entries, events = read_history(run), read_event_lines(run.events)
    unspoken = find_crash(run)  # of a process that is still at work, too
    if unspoken is not None:
        entries.append(unspoken)
    processes = split_processes(entries)
    running = sum(max(0.0, process[-1].time - process[0].time) for process in processes)
    evaluation = sum(event.seconds for event in events if isinstance(event, EvalDone) and math.isfinite(event.seconds))
    return Goodput(
        wall_seconds=max(0.0, processes[-1][-1].time - processes[0][0].time) if processes else 0.0,
        running_seconds=running,
        # What the steps' speeds say is an estimate where their tokens vary.
        kept_seconds=min(sum(event.seconds for event in events if isinstance(event, StepLogged)), running),
        evaluation_seconds=evaluation,
        lost_steps=_count_lost(processes),
        restarts=max(0, len(processes) - 1),
        rollbacks=sum(isinstance(entry, RolledBack) for entry in entries),
        skipped=sum(isinstance(entry, UpdateSkipped) for entry in entries),
    )


def describe_goodput(goodput: Goodput) -> str:
    """One sentence."""
    kept, running, wall, evaluation = map(
        format_seconds,
        (goodput.kept_seconds, goodput.running_seconds, goodput.wall_seconds, goodput.evaluation_seconds),
    )
    parts = [
        f"goodput {goodput.share_of_running:.1%}: {kept} of {running} running went into steps that were kept",
        f"{evaluation} into evaluations" if goodput.evaluation_seconds else "",
        f"{count(goodput.lost_steps, 'step')} lost, {count(goodput.restarts, 'restart')}, "
        f"{count(goodput.rollbacks, 'rollback')}, {count(goodput.skipped, 'update')} skipped",
        f"{goodput.share_of_wall:.1%} of the {wall} since the first start",
    ]
    return "; ".join(part for part in parts if part)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _count_lost(processes: list[list[Event]]) -> int:
    lost = reached = 0
    for process in processes:
        lost += max(0, reached - process[0].step)
        lost += sum(entry.from_step - entry.step for entry in process if isinstance(entry, RolledBack))
        reached = process[-1].step
    return lost
