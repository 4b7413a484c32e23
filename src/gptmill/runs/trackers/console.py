"""The console tracker: a live display in a terminal, a text in a notebook's cell, plain lines in files and pipes."""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from gptmill.runs.display import shorten_checksum
from gptmill.runs.events import (
    EvalDone,
    Event,
    LastStepMoved,
    RolledBack,
    RunFinished,
    RunStarted,
    ScoresDone,
    StepLogged,
    UpdateSkipped,
    Warned,
)
from gptmill.runs.trackers.protocol import Tracker
from gptmill.runtime.interactive import CellText, is_notebook

PLAIN_SECONDS = 5.0  # between two lines, whatever the speed
MAX_CELL_LINES = 12
MAX_SKIP_LINES = 10  # before they are limited to one per PLAIN_SECONDS: a run may skip for hours


def build_console() -> Tracker:
    """Returns a live display if standard output is a terminal or a notebook, else plain lines."""
    if is_notebook():
        return CellDisplay(CellText())
    console = _Console(highlight=False, force_jupyter=False)
    is_live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if is_live else PlainLines(console)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError; rich would exit the process, and with it the run."""
        raise BrokenPipeError("standard output is closed")


class PlainLines:
    """Prints the first and the last step, every evaluation, and a step every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._max_steps = 0
        self._val_loss: float | None = None
        self._last_line = -math.inf
        self._incidents = Incidents()

    def track(self, event: Event) -> None:
        for line in self._incidents.describe(event):
            self._print(line)
        if isinstance(event, RunStarted):
            self._max_steps = event.max_steps
            self._val_loss = event.val_loss
            self._print(describe_start(event))
        elif isinstance(event, LastStepMoved):
            self._max_steps = event.max_steps
        elif isinstance(event, StepLogged):
            now = time.monotonic()
            if now - self._last_line >= PLAIN_SECONDS or event.step == self._max_steps:
                self._last_line = now
                self._print(f"step {event.step}/{self._max_steps} | {describe_step(event, self._val_loss)}")
        elif isinstance(event, EvalDone):
            self._val_loss = event.val_loss
            self._print(describe_eval(event))
        elif isinstance(event, ScoresDone):
            self._print(describe_scores(event))
        elif isinstance(event, RunFinished):
            self._print(describe_end(event))

    def rewind(self, step: int) -> None:
        self._val_loss = None
        self._incidents.rewind(step)

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class LiveDisplay:
    """Shows a progress bar and the latest metrics, with evaluations scrolling above them."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("eta {task.fields[eta]}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=None, eta="…")
        self._console = console
        self._metrics = Text()
        self._val_loss: float | None = None
        self._incidents = Incidents()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def track(self, event: Event) -> None:
        for line in self._incidents.describe(event):
            self._console.print(line, markup=False, style="yellow")
        if isinstance(event, RunStarted):
            self._console.print(describe_start(event), markup=False)
            self._progress.update(self._task, total=event.max_steps, completed=event.step)
            self._val_loss = event.val_loss
            self._live.start()
        elif isinstance(event, LastStepMoved):
            self._progress.update(self._task, total=event.max_steps)
        elif isinstance(event, StepLogged):
            self._progress.update(self._task, completed=event.step, eta=_format_seconds(event.seconds_left))
            self._metrics = Text(describe_step(event, self._val_loss, eta=False))
        elif isinstance(event, EvalDone):
            self._val_loss = event.val_loss
            self._console.print(describe_eval(event), markup=False)
        elif isinstance(event, ScoresDone):
            self._console.print(describe_scores(event), markup=False)
        elif isinstance(event, RunFinished):
            self.close()
            self._console.print(describe_end(event), markup=False)

    def rewind(self, step: int) -> None:
        self._val_loss = None
        self._incidents.rewind(step)
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        return Group(self._progress, self._metrics)


class CellDisplay:
    """Shows the start, the latest notable events and the latest step as one text, replaced in place."""

    def __init__(self, output: CellText) -> None:
        self._output = output
        self._start = self._latest = ""
        self._max_steps = 0
        self._val_loss: float | None = None
        self._notable: deque[str] = deque(maxlen=MAX_CELL_LINES)
        self._incidents = Incidents()

    def track(self, event: Event) -> None:
        lines = self._incidents.describe(event)
        if isinstance(event, RunStarted):
            self._start, self._max_steps, self._val_loss = describe_start(event), event.max_steps, event.val_loss
        elif isinstance(event, LastStepMoved):
            self._max_steps = event.max_steps
        elif isinstance(event, StepLogged):
            self._latest = f"step {event.step}/{self._max_steps} | {describe_step(event, self._val_loss)}"
        elif isinstance(event, EvalDone):
            self._val_loss = event.val_loss
            lines.append(describe_eval(event))
        elif isinstance(event, ScoresDone):
            lines.append(describe_scores(event))
        elif isinstance(event, RunFinished):
            lines += [self._latest, describe_end(event)]
            self._latest = ""
        self._notable.extend(lines)
        text = "\n".join(filter(None, [self._start, *self._notable, self._latest]))
        self._output.show(text, at_once=bool(lines))

    def rewind(self, step: int) -> None:
        self._val_loss = None
        self._incidents.rewind(step)

    def close(self) -> None:
        pass


class Incidents:
    """Describes skipped updates, rollbacks and warnings, and counts the skipped updates."""

    def __init__(self) -> None:
        self._skipped = 0
        self._counted_until = 0
        self._last_line = -math.inf

    def describe(self, event: Event) -> list[str]:
        """Returns the lines for an event; none if it is not an incident."""
        if isinstance(event, StepLogged):
            self._skipped, self._counted_until = event.skipped, event.step
        elif isinstance(event, UpdateSkipped):
            if event.step > self._counted_until:  # else the StepLogged event has counted it
                self._skipped += 1
            return self._describe_skip(event)
        elif isinstance(event, RolledBack):
            return [describe_rollback(event)]
        elif isinstance(event, Warned):
            return [f"warning: {event.message}"]
        return []

    def rewind(self, step: int) -> None:
        self._counted_until = min(self._counted_until, step)

    def _describe_skip(self, event: UpdateSkipped) -> list[str]:
        now = time.monotonic()
        if self._skipped > MAX_SKIP_LINES and now - self._last_line < PLAIN_SECONDS:
            return []
        self._last_line = now
        numbers = f"loss {event.loss:.4g}, gradient norm {event.grad_norm:.4g}"
        return [f"step {event.step:,}: {numbers}: update skipped ({self._skipped:,} so far)"]


def describe_start(event: RunStarted) -> str:
    tokens = event.total_tokens or event.max_steps * event.tokens_per_step
    is_sparse = 0 < event.active_parameters < event.parameters
    active = f" ({event.active_parameters:,} active)" if is_sparse else ""
    rows = {
        "run": event.run,
        "model": f"{event.parameters:,} parameters{active}, {event.precision}",
        "weights": "" if event.resumed_from or not event.parent else f"from {shorten_checksum(event.parent)}",
        "compute": _describe_compute(event),
        "layout": event.layout,
        "optimizer": event.optimizer,
        "data": f"{event.corpus} ({event.tokenizer})",
        "device": event.device if event.ranks == 1 else f"{event.ranks} x {event.device} {event.strategy}".rstrip(),
        "steps": f"{event.step:,} to {event.max_steps:,} of {event.tokens_per_step:,} tokens each, {tokens:,} in all",
    }
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in shown.items())


def describe_step(event: StepLogged, val_loss: float | None, *, eta: bool = True) -> str:
    parts = [
        f"epoch {event.epoch:.2f}",
        f"loss {event.loss:.4f}",
        f"val {val_loss:.4f}" if val_loss is not None else "",
        f"lr {event.lr:.2e}",
        f"norm {event.grad_norm:.3f}",
        f"{event.tokens_per_second:,.0f} tok/s",
        format_rate(event.tflops) if event.tflops else "",
        f"MFU {event.mfu:.1%}" if event.mfu is not None else "",
        f"{event.memory_gb:.1f} GB" if event.memory_gb else "",
        _describe_gpu(event.telemetry),
        f"busiest expert {event.experts['busiest']:.2f}x" if "busiest" in event.experts else "",
        f"skipped {event.skipped:,}" if event.skipped else "",
        f"eta {_format_seconds(event.seconds_left)}" if eta else "",
    ]
    return " | ".join(part for part in parts if part)


def _describe_gpu(telemetry: dict[str, float]) -> str:
    """Such as GPU 97% 612 W 61 °C; empty without a GPU that was measured."""
    formats = {"gpu_utilization": "{:.0%}", "gpu_power_watts": "{:.0f} W", "gpu_temperature_celsius": "{:.0f} °C"}
    found = [text.format(telemetry[name]) for name, text in formats.items() if name in telemetry]
    return " ".join(["GPU", *found]) if found else ""


def describe_eval(event: EvalDone) -> str:
    perplexity = f"{event.perplexity:,.2f}" if event.perplexity < 1e9 else f"{event.perplexity:.3g}"
    parts = [f"step {event.step:,}: val loss {event.val_loss:.4f}, perplexity {perplexity}"]
    parts += [f"{name} {loss:.4f}" for name, loss in event.by_corpus.items()]
    if event.ema_loss is not None:
        parts.append(f"EMA weights {event.ema_loss:.4f}")
    return " | ".join(parts)


def describe_scores(event: ScoresDone) -> str:
    return f"step {event.step:,}: " + " | ".join(f"{name} {score:.4f}" for name, score in event.scores.items())


def describe_rollback(event: RolledBack) -> str:
    skipped = f"; windows {event.windows[0]:,} to {event.windows[1] - 1:,} are skipped" if event.windows else ""
    return f"step {event.from_step:,}: {event.reason}: rolled back to step {event.step:,}{skipped}"


def describe_end(event: RunFinished) -> str:
    how, _, why = event.reason.partition(": ")
    return f"{how} at step {event.step:,} after {_format_seconds(event.seconds)}" + (f": {why}" if why else "")


def _describe_compute(event: RunStarted) -> str:
    """Describes FLOPs per token and the device's peak; says that the peak is unknown, except for a CPU."""
    if not event.flops_per_token:
        return ""
    peak = ""
    if event.peak_tflops is not None:
        peak = f", peak {format_rate(event.peak_tflops)} per device"
    elif not event.device.startswith("CPU"):
        peak = "; MFU is unknown, since the peak rate of this device is"
    return f"{event.flops_per_token / 1e6:,.1f} MFLOP per token{peak}"


def format_rate(tflops: float) -> str:
    if tflops >= 1:
        return f"{tflops:,.0f} TFLOP/s" if tflops >= 100 else f"{tflops:.1f} TFLOP/s"
    return f"{1000 * tflops:.3g} GFLOP/s"


def _format_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
