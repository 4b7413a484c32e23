"""The report of a run for the terminal: loss curve, validation losses and samples. Reads events.jsonl only."""

from __future__ import annotations

import math

from gptmill.runs.directory import RunDirectory
from gptmill.runs.display import make_plain
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, SampleDrawn, StepLogged

SMOOTHED_POINTS = 120
MAX_DRAWN = 1e9  # a larger loss, or one that is not finite, would flatten the curve
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BLANK = 0x2800

Points = list[tuple[float, float]]


def make_report(run: RunDirectory, encoding: str = "utf-8") -> str:
    """Returns the loss curve, and the first and the last sample, in characters that `encoding` has.

    Raises FileNotFoundError if the run has no events.
    """
    events = read_events(run.events)
    steps = [event for event in events if isinstance(event, StepLogged) and abs(event.loss) < MAX_DRAWN]
    evals = [event for event in events if isinstance(event, EvalDone) and abs(event.val_loss) < MAX_DRAWN]
    samples = [event for event in events if isinstance(event, SampleDrawn)]
    parts = []
    if steps:
        marks = [(float(event.step), event.val_loss) for event in evals]
        legend = "dots are training, o is validation" if evals else "training"
        parts.append(_title(f"loss by step: {legend}") + draw_chart(_smooth(steps), marks))
    if evals:
        parts.append(_describe_evals(evals[0], evals[-1]))
    if samples:
        shown = [samples[0], samples[-1]] if len(samples) > 1 else samples
        for event in shown:
            text = make_plain(event.prompt + event.text, encoding)
            parts.append(_title(f"sample at step {event.step:,}") + text)
    return "\n\n".join(parts)


def _describe_evals(first: EvalDone, last: EvalDone) -> str:
    """Describes the first and last validation loss, and the last loss per corpus and of the EMA weights."""
    lines = [f"validation loss {first.val_loss:.4f} at step {first.step}, {last.val_loss:.4f} at step {last.step}"]
    lines += [f"  of {make_plain(name)} {loss:.4f}" for name, loss in last.by_corpus.items()]
    if last.ema_loss is not None:
        lines.append(f"  of the EMA weights {last.ema_loss:.4f}")
    return "\n".join(lines)


def _smooth(steps: list[StepLogged]) -> list[tuple[float, float]]:
    """Returns at most SMOOTHED_POINTS points, each the mean of neighbouring steps."""
    size = math.ceil(len(steps) / SMOOTHED_POINTS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(float(group[-1].step), sum(step.loss for step in group) / len(group)) for group in groups]


def draw_chart(curve: Points, marks: Points, width: int = 60, height: int = 12) -> str:
    """Draws `curve` in Braille dots, each character a grid of 2 x 4, and `marks` as circles, with the axes' ranges."""
    xs, ys = zip(*curve, *marks, strict=True)
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0
    cells = [[BLANK] * width for _ in range(height)]
    for x, y in curve:
        column = round((x - x_low) / x_span * (2 * width - 1))
        row = round((y_high - y) / y_span * (4 * height - 1))
        cells[row // 4][column // 2] |= DOT_BITS[column % 2][row % 4]
    for x, y in marks:
        cells[round((y_high - y) / y_span * (height - 1))][round((x - x_low) / x_span * (width - 1))] = ord("o")
    labels = [""] * height
    labels[0], labels[-1] = f"{y_high:.3f}", f"{y_low:.3f}"
    margin = max(len(label) for label in labels)
    lines = [
        f"{label:>{margin}} ┤{''.join(chr(cell) if cell != BLANK else ' ' for cell in row)}"
        for label, row in zip(labels, cells, strict=True)
    ]
    axis = f"{x_low:,.0f}".ljust(width - len(f"{x_high:,.0f}")) + f"{x_high:,.0f}"
    return "\n".join([*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {axis}"])


def _title(text: str) -> str:
    return f"── {text} ".ljust(72, "─") + "\n"
