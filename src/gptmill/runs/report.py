"""What a run learnt, for the terminal. Reads events.jsonl alone."""

from __future__ import annotations

import math

from gptmill.runs.chart import draw_chart
from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import make_plain
from gptmill.runs.events import EvalDone, Event, SampleDrawn, StepLogged, from_json

SMOOTHED_POINTS = 120


def read_events(run: RunDirectory) -> list[Event]:
    """Every event of the run; a last line that a kill cut short is left out."""
    events = []
    for line in run.events.read_text(encoding="utf-8").split("\n"):
        try:
            event = from_json(line)
        except ValueError:
            continue
        if event is not None:
            events.append(event)
    return events


def make_report(run: RunDirectory, encoding: str = "utf-8") -> str:
    """The loss curve, and a sample from the start beside one from the end, in letters that `encoding` has."""
    events = read_events(run)
    steps = [event for event in events if isinstance(event, StepLogged) and math.isfinite(event.loss)]
    evals = [event for event in events if isinstance(event, EvalDone) and math.isfinite(event.val_loss)]
    samples = [event for event in events if isinstance(event, SampleDrawn)]
    parts = []
    if steps:
        marks = [(float(event.step), event.val_loss) for event in evals]
        parts.append(_title("loss by step: dots are training, o is validation") + draw_chart(_smooth(steps), marks))
    if evals:
        parts.append(_describe_evals(evals[0], evals[-1]))
    if samples:
        shown = [samples[0], samples[-1]] if len(samples) > 1 else samples
        for event in shown:
            text = make_plain(event.prompt + event.text, encoding)
            parts.append(_title(f"sample at step {event.step:,}") + text)
    return "\n\n".join(parts)


def _describe_evals(first: EvalDone, last: EvalDone) -> str:
    """The losses of the start and of the end; that of each corpus and of the averaged weights at the end."""
    lines = [f"validation loss {first.val_loss:.4f} at step {first.step}, {last.val_loss:.4f} at step {last.step}"]
    lines += [f"  of {make_plain(name)} {loss:.4f}" for name, loss in last.by_corpus.items()]
    if last.ema_loss is not None:
        lines.append(f"  of the averaged weights {last.ema_loss:.4f}")
    return "\n".join(lines)


def _smooth(steps: list[StepLogged]) -> list[tuple[float, float]]:
    """At most a screen's worth of points, each the mean of its neighbours."""
    size = math.ceil(len(steps) / SMOOTHED_POINTS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(float(group[-1].step), sum(step.loss for step in group) / len(group)) for group in groups]


def _title(text: str) -> str:
    return f"── {text} ".ljust(72, "─") + "\n"
