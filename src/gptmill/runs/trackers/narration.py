"""What the console says about a run, event by event: the text that a terminal, a file and a notebook share."""

from __future__ import annotations

from gptmill.runs.events import (
    EvalDone,
    Event,
    LastStepMoved,
    RunFinished,
    RunStarted,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
)
from gptmill.runs.trackers.event_lines import (
    Line,
    describe_end,
    describe_eval,
    describe_samples,
    describe_scores,
    describe_step,
    describe_train_eval,
)
from gptmill.runs.trackers.incidents import Incidents
from gptmill.runs.trackers.start_lines import describe_start


class Narrator:
    """Turns events into lines, and remembers what later lines need. Which steps get a line is not decided here."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.max_steps = 0
        self.val_loss: float | None = None
        self.device_memory_gb = 0.0
        self._encoding = encoding
        self._incidents = Incidents()

    def describe(self, event: Event) -> list[Line]:
        """Returns the lines for an event; none for a step."""
        lines = [Line(text, "incident") for text in self._incidents.describe(event)]
        if isinstance(event, RunStarted):
            self.max_steps, self.val_loss = event.max_steps, event.val_loss
            self.device_memory_gb = event.device_memory_gb
            lines.append(Line(describe_start(event), "start"))
        elif isinstance(event, LastStepMoved):
            self.max_steps = event.max_steps
        elif isinstance(event, EvalDone):
            self.val_loss = event.val_loss
            lines.append(Line(describe_eval(event), "evaluation"))
        elif isinstance(event, TrainEvalDone):
            lines.append(Line(describe_train_eval(event), "evaluation"))
        elif isinstance(event, ScoresDone):
            lines.append(Line(describe_scores(event), "evaluation"))
        elif isinstance(event, SampleDrawn):
            lines += describe_samples(event, self._encoding)
        elif isinstance(event, RunFinished):
            lines.append(Line(describe_end(event), "end"))
        return lines

    def describe_step(self, event: StepLogged) -> Line:
        step = f"step {event.step}/{self.max_steps} | {describe_step(event, self.val_loss, self.device_memory_gb)}"
        return Line(step, "step")

    def rewind(self, step: int) -> None:
        """Forgets what a rollback has undone."""
        self.val_loss = None
        self._incidents.rewind(step)
