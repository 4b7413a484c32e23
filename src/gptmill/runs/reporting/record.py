"""What a report needs of a run, collected from its events one by one, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gptmill.runs.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    LastStepMoved,
    RunCrashed,
    RunStarted,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
)
from gptmill.runs.history import END_EVENTS, HISTORY_EVENTS, UNKNOWN_REASON
from gptmill.runs.reporting.series import Series

METRICS = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "data_wait")
MAX_SAMPLES = 64
MAX_ENTRIES = 20_000  # starts, ends, skipped updates, warnings


@dataclass(frozen=True)
class Evaluation:
    """One validation loss, and the training time until then."""

    step: int
    loss: float
    elapsed_seconds: float


@dataclass
class RunRecord:
    """All that is kept of a run's events."""

    name: str
    starts: list[RunStarted] = field(default_factory=list)
    entries: list[Event] = field(default_factory=list)
    """Starts, ends and incidents, with a crash where the end of a process is missing."""
    curves: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in METRICS})
    telemetry: dict[str, Series] = field(default_factory=dict)
    elapsed: Series = field(default_factory=Series)
    """Training time by step, without the time between processes."""
    evaluations: list[Evaluation] = field(default_factory=list)
    last_evaluation: EvalDone | None = None
    train_evaluations: list[Evaluation] = field(default_factory=list)
    """Losses on training windows, of a run with eval_train."""
    scores: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The newest score of each evaluator, with its step."""
    samples: list[SampleDrawn] = field(default_factory=list)
    checkpoints: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Folder name and bytes by step."""
    logged_steps: int = 0
    tokens: float = 0.0
    """Tokens of the logged steps."""
    sequences: float = 0.0
    """Sequences of the logged steps; 0 if not recorded."""
    trained_steps: int = 0
    """Steps whose time was logged."""
    last_step: int = 0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    stalled_seconds: float = 0.0
    """Time that training was blocked by checkpoints."""
    joules: float | None = None
    """Energy of the GPUs on the machine of rank 0; None if their power was not measured."""
    memory_gb: float = 0.0


class Recorder:
    """Adds events to a record."""

    def __init__(self, name: str) -> None:
        self.record = RunRecord(name)
        self._earlier_seconds = 0.0
        self._process_start = 0.0
        self._last: Event | None = None
        self._last_step_time = 0.0

    def add(self, event: Event) -> None:
        record = self.record
        if isinstance(event, RunStarted):
            self._start_process(event)
        if isinstance(event, HISTORY_EVENTS) and len(record.entries) < MAX_ENTRIES:
            record.entries.append(event)
        if isinstance(event, StepLogged):
            self._add_step(event)
        elif isinstance(event, EvalDone):
            record.evaluations.append(Evaluation(event.step, event.val_loss, self._measure_elapsed(event)))
            record.last_evaluation = event
            record.evaluation_seconds += _make_positive(event.seconds)
        elif isinstance(event, TrainEvalDone):
            record.train_evaluations.append(Evaluation(event.step, event.train_loss, self._measure_elapsed(event)))
            record.evaluation_seconds += _make_positive(event.seconds)
        elif isinstance(event, ScoresDone):
            record.scores |= {name: (event.step, score) for name, score in event.scores.items()}
            record.evaluation_seconds += _make_positive(event.seconds)
        elif isinstance(event, SampleDrawn):
            self._add_sample(event)
        elif isinstance(event, LastStepMoved) and record.starts:
            record.starts[-1] = replace(record.starts[-1], max_steps=event.max_steps)
        elif isinstance(event, CheckpointSaved):
            record.checkpoints[event.step] = (Path(event.path).name, event.size_bytes)
            record.stalled_seconds += _make_positive(event.stalled_seconds)
        record.last_step = event.step if isinstance(event, RunStarted) else max(record.last_step, event.step)
        self._last = event

    def finish(self) -> RunRecord:
        self._end_process()
        return self.record

    def _start_process(self, start: RunStarted) -> None:
        self._end_process()
        self.record.starts.append(start)
        self._earlier_seconds = self._measure_elapsed(self._last) if self._last else 0.0
        self._process_start = self._last_step_time = start.time

    def _end_process(self) -> None:
        """Adds the missing end of a process that was killed: at its last event."""
        entries, last = self.record.entries, self._last
        if last is not None and entries and not isinstance(entries[-1], END_EVENTS):
            entries.append(RunCrashed(last.step, UNKNOWN_REASON, time=last.time))

    def _measure_elapsed(self, event: Event) -> float:
        return self._earlier_seconds + max(0.0, event.time - self._process_start)

    def _add_step(self, event: StepLogged) -> None:
        record, seconds = self.record, _make_positive(event.seconds)
        record.logged_steps += 1
        for name, curve in record.curves.items():
            value = getattr(event, name)
            if value is not None:
                curve.add(event.step, value)
        for name, value in event.telemetry.items():
            record.telemetry.setdefault(name, Series()).add(event.step, value)
        record.elapsed.add(event.step, self._measure_elapsed(event))
        record.tokens += _make_positive(event.tokens_per_second) * seconds
        record.sequences += _make_positive(event.samples_per_second) * seconds
        record.trained_steps += event.steps
        record.step_seconds += seconds
        record.waited_seconds += seconds * min(1.0, _make_positive(event.data_wait))
        record.memory_gb = max(record.memory_gb, event.memory_gb)
        self._add_energy(event)

    def _add_energy(self, event: StepLogged) -> None:
        watts = event.telemetry.get("gpu_power_watts")
        if watts is not None and math.isfinite(watts):
            seconds = max(0.0, event.time - self._last_step_time)
            self.record.joules = (self.record.joules or 0.0) + watts * seconds
        self._last_step_time = event.time

    def _add_sample(self, event: SampleDrawn) -> None:
        """Keeps the first, the last and some between."""
        samples = self.record.samples
        samples.append(event)
        if len(samples) > MAX_SAMPLES:
            self.record.samples = [*samples[:-1:2], event]


def record_events(name: str, events: Iterable[Event]) -> RunRecord:
    """Collects what a report needs of the events."""
    recorder = Recorder(name)
    for event in events:
        recorder.add(event)
    return recorder.finish()


def find_elapsed(record: RunRecord, step: int) -> float:
    """Returns the training time until a step, from the nearest one logged before it."""
    before = [group for group in record.elapsed.groups if group.first <= step]
    return before[-1].high if before else 0.0


def _make_positive(number: float) -> float:
    return number if math.isfinite(number) and number > 0 else 0.0
