"""Goodput: the share of a run's time spent on steps that were not lost to a crash or a rollback."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, Event, RolledBack, StepLogged, TrainEvalDone, UpdateSkipped
from gptmill.runs.history import find_crash, read_history, split_processes


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, according to its files."""

    wall_seconds: float
    """From the first start to the last activity."""
    running_seconds: float
    """Of the wall time, with a process running."""
    kept_seconds: float
    """Of the running time, in steps that were not lost."""
    evaluation_seconds: float
    """Of the running time, in evaluations that were not lost."""
    lost_steps: int
    """Steps that a later start or a rollback discarded."""
    restarts: int
    rollbacks: int
    skipped: int
    """Updates skipped because the loss or gradient was not finite."""

    @property
    def share_of_running(self) -> float:
        return self.kept_seconds / self.running_seconds if self.running_seconds > 0 else 0.0

    @property
    def share_of_wall(self) -> float:
        return self.kept_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def make_goodput(run: RunDirectory) -> Goodput:
    """Computes the goodput from the history, which has every start, and the events, which have every kept step once."""
    entries, events = read_history(run), read_events(run.events, missing_ok=True)
    crash = find_crash(run)  # a process that is still running counts as ending now
    if crash is not None:
        entries.append(crash)

    def sum_seconds(*kinds: type[StepLogged | EvalDone | TrainEvalDone]) -> float:
        return sum(max(0.0, event.seconds) for event in events if isinstance(event, kinds))

    return compute_goodput(entries, sum_seconds(StepLogged), sum_seconds(EvalDone, TrainEvalDone))


def compute_goodput(entries: list[Event], step_seconds: float, evaluation_seconds: float) -> Goodput:
    """Computes the goodput from starts and ends, and the time of the steps and evaluations that were kept."""
    processes = split_processes(entries)
    running = sum(max(0.0, process[-1].time - process[0].time) for process in processes)
    return Goodput(
        wall_seconds=max(0.0, processes[-1][-1].time - processes[0][0].time) if processes else 0.0,
        running_seconds=running,
        # The seconds of a step are estimates where steps differ in their tokens.
        kept_seconds=min(step_seconds, running),
        evaluation_seconds=min(evaluation_seconds, running),
        lost_steps=_count_lost(processes),
        restarts=max(0, len(processes) - 1),
        rollbacks=sum(isinstance(entry, RolledBack) for entry in entries),
        skipped=sum(isinstance(entry, UpdateSkipped) for entry in entries),
    )


def describe_goodput(goodput: Goodput) -> str:
    """Describes the goodput in one sentence."""
    kept, running, wall, evaluation = map(
        format_seconds,
        (goodput.kept_seconds, goodput.running_seconds, goodput.wall_seconds, goodput.evaluation_seconds),
    )
    parts = [
        f"goodput {goodput.share_of_running:.1%}: {kept} of {running} running time went into steps that were kept",
        f"{evaluation} into evaluations" if goodput.evaluation_seconds else "",
        f"{count(goodput.lost_steps, 'step')} lost, {count(goodput.restarts, 'restart')}, "
        f"{count(goodput.rollbacks, 'rollback')}, {count(goodput.skipped, 'update')} skipped",
        f"{goodput.share_of_wall:.1%} of the {wall} since the first start",
    ]
    return "; ".join(part for part in parts if part)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _count_lost(processes: list[list[Event]]) -> int:
    lost = reached = 0
    for process in processes:
        lost += max(0, reached - process[0].step)
        lost += sum(entry.from_step - entry.step for entry in process if isinstance(entry, RolledBack))
        reached = process[-1].step
    return lost
