"""How long a run had trained at a moment, from its events: without lost steps and the time between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gptmill.runs.event_log import iterate_lines, parse_event
from gptmill.runs.events import RunStarted

KIND_BYTES = 50  # in which a line says what its event is


@dataclass(frozen=True)
class TrainingClock:
    """The starts of the processes, each with the training time before it."""

    starts: list[tuple[float, float]] = field(default_factory=list)

    def measure(self, moment: float) -> float | None:
        """Returns the seconds trained until then; None before the first start."""
        earlier = [(start, before) for start, before in self.starts if start <= moment]
        if not earlier:
            return None
        start, before = earlier[-1]
        return before + moment - start


def read_training_clock(events: Path) -> TrainingClock:
    """Reads the clock from events.jsonl, of which it parses two lines per process; without the file, it is empty."""
    clock, previous = TrainingClock(), b""
    try:
        for line in iterate_lines(events):
            if b'"RunStarted"' in line[:KIND_BYTES]:
                _add_start(clock, line, previous)
            previous = line
    except OSError:
        return TrainingClock()
    return clock


def _add_start(clock: TrainingClock, line: bytes, previous: bytes) -> None:
    start, last = parse_event(line.decode(errors="replace")), parse_event(previous.decode(errors="replace"))
    if isinstance(start, RunStarted):
        clock.starts.append((start.time, (clock.measure(last.time) if last else None) or 0.0))
