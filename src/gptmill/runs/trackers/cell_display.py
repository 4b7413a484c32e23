"""The console in a notebook: one text in its cell, replaced in place."""

from __future__ import annotations

from collections import deque

from gptmill.runs.events import Event, RunFinished, StepLogged
from gptmill.runs.trackers.event_lines import Line
from gptmill.runs.trackers.narration import Narrator
from gptmill.runtime.interactive import CellText

MAX_CELL_LINES = 12


class CellDisplay:
    """Shows the start, the latest notable events and samples, and the latest step."""

    def __init__(self, output: CellText) -> None:
        self._output = output
        self._narrator = Narrator()
        self._start = self._latest = ""
        self._notable: deque[str] = deque(maxlen=MAX_CELL_LINES)
        self._samples: list[str] = []

    def track(self, event: Event) -> None:
        lines = self._narrator.describe(event)
        if isinstance(event, StepLogged):
            self._latest = self._narrator.describe_step(event).text
        elif isinstance(event, RunFinished):
            lines.insert(0, Line(self._latest, "step"))
            self._latest = ""
        self._keep(lines)
        text = "\n".join(filter(None, [self._start, *self._notable, *self._samples, self._latest]))
        self._output.show(text, at_once=bool(lines))

    def rewind(self, step: int) -> None:
        self._narrator.rewind(step)

    def close(self) -> None:
        pass

    def _keep(self, lines: list[Line]) -> None:
        self._samples = [line.text for line in lines if line.kind == "sample"] or self._samples
        for line in lines:
            if line.kind == "start":
                self._start = line.text
            elif line.kind != "sample":
                self._notable.append(line.text)
