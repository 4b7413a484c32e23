"""All facts of a run that a report states, computed from its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.directory import RunDirectory, find_run
from gptmill.runs.event_log import iterate_events
from gptmill.runs.events import Event, RunStarted, SampleDrawn
from gptmill.runs.goodput import Goodput, compute_goodput
from gptmill.runs.history import END_EVENTS, read_history, split_processes
from gptmill.runs.history_text import describe_entries
from gptmill.runs.reporting.cost import Cost, compute_cost
from gptmill.runs.reporting.learning import (
    Learning,
    LossChange,
    TimelineRow,
    find_learning,
    find_loss_changes,
    make_timeline,
)
from gptmill.runs.reporting.phases import Phase, find_phases
from gptmill.runs.reporting.record import RunRecord, record_events
from gptmill.runs.reporting.speed import Speed, explain_speed, measure_speed
from gptmill.runs.run_lock import is_locked
from gptmill.runs.run_summary import RunState, find_state

MAX_INCIDENTS = 40

ReportReading = Callable[[int, int], None]


@dataclass(frozen=True)
class Incident:
    """Something that happened to the run."""

    time: float
    step: int
    kind: str
    """The name of its event."""
    text: str


@dataclass(frozen=True)
class RunFacts:
    """What a report says about one run."""

    record: RunRecord
    state: RunState
    learning: Learning | None
    losses: list[LossChange]
    """Training and validation, first to last."""
    phases: list[Phase]
    timeline: list[TimelineRow]
    goodput: Goodput
    speed: Speed
    explanations: list[str]
    """What bounds the speed, and why."""
    cost: Cost
    samples: list[SampleDrawn]
    """At the start, in the middle and at the end."""
    incidents: list[Incident]
    """The first ones, in order."""
    more_incidents: int

    @property
    def start(self) -> RunStarted | None:
        """The newest start."""
        return self.record.starts[-1] if self.record.starts else None


def find_reported(name_or_path: str, logdir: str) -> RunDirectory:
    """Returns the run; raises UserError if it has no events to report. Its folder needs no other file."""
    for path in (Path(logdir) / name_or_path, Path(name_or_path)):
        folder = path.parent if path.name == "events.jsonl" and path.is_file() else path
        if (folder / "events.jsonl").is_file():
            return RunDirectory(folder if folder.name else folder.resolve())
    run = find_run(name_or_path, logdir)
    if run.has_checkpoints:
        raise UserError(f"run {run.path} has no events.jsonl: it was imported, or the file is lost; nothing to report")
    raise UserError(f"run {run.path} has no events.jsonl: it has not started yet; train it first")


def collect_facts(run: RunDirectory, price_per_hour: float | None, report: ReportReading | None = None) -> RunFacts:
    """Reads a run once, and computes everything that a report states."""
    record = record_events(run.path.name, iterate_events(run.events, report))
    # events.jsonl alone will do, but lacks what a restart or a rollback discarded.
    entries = read_history(run) or record.entries
    is_running = is_locked(run)
    if is_running and entries is record.entries:
        entries = entries[:-1]  # the end of a process that has not ended
    return compute_facts(record, entries, price_per_hour, run, is_running=is_running)


def compute_facts(
    record: RunRecord, entries: list[Event], price_per_hour: float | None, run: RunDirectory, *, is_running: bool
) -> RunFacts:
    incidents = _list_incidents(entries)
    if entries and not isinstance(entries[-1], END_EVENTS) and record.entries:
        entries = [*entries, record.entries[-1]]  # its last activity
        incidents = incidents if is_running else _list_incidents(entries)
    goodput = compute_goodput(entries, record.step_seconds, record.evaluation_seconds)
    learning = find_learning(record)
    speed = measure_speed(record, goodput)
    return RunFacts(
        record,
        find_state(run, split_processes(entries), is_running=is_running),
        learning,
        find_loss_changes(record),
        find_phases(record),
        make_timeline(record),
        goodput,
        speed,
        explain_speed(speed, goodput, record.starts[-1] if record.starts else None),
        compute_cost(record, learning, goodput.running_seconds, price_per_hour),
        _choose_samples(record.samples),
        incidents[:MAX_INCIDENTS],
        max(0, len(incidents) - MAX_INCIDENTS),
    )


def _list_incidents(entries: list[Event]) -> list[Incident]:
    """Returns everything but the first start and an end as planned."""
    described = describe_entries(entries)
    incidents = [Incident(entry.time, entry.step, type(entry).__name__, text) for entry, text in described]
    if incidents and incidents[0].kind == RunStarted.__name__:
        incidents = incidents[1:]
    if incidents and incidents[-1].text.startswith("finished"):
        incidents = incidents[:-1]
    return incidents


def _choose_samples(samples: list[SampleDrawn]) -> list[SampleDrawn]:
    if len(samples) < 3:
        return samples
    middle = (samples[0].step + samples[-1].step) / 2
    between = min(samples[1:-1], key=lambda sample: abs(sample.step - middle))
    return [samples[0], between, samples[-1]]
