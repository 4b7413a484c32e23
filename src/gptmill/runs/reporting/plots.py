"""The plots of a report: loss, learning rate, gradient norm, speed and telemetry, of one run or several."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptmill.runs.reporting.document import Plot
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.formatting import format_amount, format_number
from gptmill.runs.reporting.series import Series
from gptmill.runs.reporting.style import STYLES
from gptmill.runs.reporting.svg import Axis, Chart, Line, Points, make_axis
from gptmill.runs.reporting.text_chart import draw_chart

WIDE, WIDE_HEIGHT = 736.0, 320.0
NARROW, NARROW_HEIGHT = 356.0, 250.0
SMALL_HEIGHT = 180.0
MAX_BAND = 500
MAX_MARKS = 60
WIDE_RANGE = 50.0  # between the largest and the smallest value, from which on an axis is logarithmic
NEAR_ZERO = 0.05  # of the last step: an axis that begins before that begins at 0
CUT_FACTOR = 1.6  # of the largest smoothed loss, above which spikes leave the frame


@dataclass(frozen=True)
class Metric:
    """A metric of the steps, and how to draw it."""

    name: str
    title: str
    format: Callable[[float], str]


METRICS = (
    Metric("lr", "Learning rate", lambda value: f"{value:.2g}"),
    Metric("grad_norm", "Gradient norm", format_number),
    Metric("tokens_per_second", "Tokens per second", format_amount),
    Metric("mfu", "Model FLOPs utilisation (MFU)", lambda value: f"{value:.0%}"),
)
TELEMETRY = {
    "gpu_utilization": "GPU utilisation",
    "gpu_memory_gb": "GPU memory, GB",
    "gpu_power_watts": "GPU power, W",
    "gpu_temperature_celsius": "GPU temperature, °C",
    "host_memory_gb": "Host memory, GB",
}

TELEMETRY_FORMATS: dict[str, Callable[[float], str]] = {"gpu_utilization": lambda value: f"{value:.0%}"}


def plot_loss(facts: RunFacts, *, is_log: bool) -> list[Plot]:
    """Returns training, raw and smoothed, and evaluated losses by step; nothing before the first loss."""
    series = facts.record.curves["loss"]
    validation, evaluated = (
        _limit_to_positive([(float(item.step), item.loss) for item in items if math.isfinite(item.loss)], is_log=is_log)
        for items in (facts.record.evaluations, facts.record.train_evaluations)
    )
    smooth = _limit_to_positive(series.smooth(logarithmic=is_log), is_log=is_log)
    lines = []
    if smooth:
        lines.append(Line(smooth, "training", 0, band=_make_band(series, is_log=is_log)))
    if validation:
        lines.append(Line(validation, "validation", 1, is_marked=len(validation) <= MAX_MARKS))
    if evaluated:
        lines.append(Line(evaluated, "train eval", 2, is_marked=len(evaluated) <= MAX_MARKS))
    if not lines:
        return []
    top = max(y for line in lines for _, y in line.points)
    extremes = [group.high for group in series.groups] + [group.low for group in series.groups]
    note = "A dotted line is a restart." if len(facts.record.starts) > 1 else ""
    if extremes and max(extremes) > CUT_FACTOR * top > 0:
        note += f" The largest training loss, {format_number(max(extremes))}, is above the frame."
        extremes = [value for value in extremes if value <= CUT_FACTOR * top]
    values = [*extremes, *(y for line in lines for _, y in line.points)]
    marks = [(float(start.step), f"restart at step {start.step:,}") for start in facts.record.starts[1:]]
    chart = _make_chart(lines, values, format_number, "Loss by step", marks, is_log=is_log)
    text = draw_chart(smooth or validation, validation)
    return [Plot("Loss by step", *_draw_both(chart), text=text, note=note.strip())]


def plot_metrics(facts: RunFacts) -> list[Plot]:
    """Returns the other metrics, as small plots."""
    curves = [(metric, facts.record.curves[metric.name]) for metric in METRICS]
    curves += [
        (
            Metric(name, title, TELEMETRY_FORMATS.get(name, format_number)),
            curve,
        )
        for name, title in TELEMETRY.items()
        if (curve := facts.record.telemetry.get(name)) is not None
    ]
    return [_plot_metric(metric, curve) for metric, curve in curves if curve.groups]


def plot_overlaid(runs: Sequence[RunFacts], letters: Sequence[str], *, is_log: bool) -> list[Plot]:
    """Returns validation and training loss of several runs, each in one plot."""
    plots = []
    evaluated = [
        [(float(item.step), item.loss) for item in facts.record.evaluations if math.isfinite(item.loss)]
        for facts in runs
    ]
    trained = [facts.record.curves["loss"].smooth(logarithmic=is_log) for facts in runs]
    for title, curves in (("Validation loss by step", evaluated), ("Training loss by step, smoothed", trained)):
        lines = [
            Line(_limit_to_positive(points, is_log=is_log), letter, style % STYLES, is_marked=curves is evaluated)
            for style, (letter, points) in enumerate(zip(letters, curves, strict=True))
        ]
        lines = [line for line in lines if line.points]
        if lines:
            values = [y for line in lines for _, y in line.points]
            plots.append(Plot(title, *_draw_both(_make_chart(lines, values, format_number, title, is_log=is_log))))
    return plots


def _plot_metric(metric: Metric, series: Series) -> Plot:
    values = [value for group in series.groups for value in (group.low, group.high)]
    is_log = metric.name == "grad_norm" and min(values) > 0 and max(values) > WIDE_RANGE * min(values)
    lines = [Line(series.smooth(), style=0, band=_make_band(series))]
    if metric.name == "lr":
        lines = [Line([(float(group.last), group.mean) for group in series.groups][:: _find_stride(series)])]
    chart = _make_chart(lines, values, metric.format, metric.title, is_log_y=is_log, from_zero=True)
    drawn = chart.draw(NARROW, SMALL_HEIGHT)
    return Plot(metric.title, drawn, drawn, is_small=True)


def _make_chart(
    lines: Sequence[Line],
    values: Sequence[float],
    format_y: Callable[[float], str],
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    *,
    is_log: bool = False,
    is_log_y: bool = False,
    from_zero: bool = False,
) -> Chart:
    steps = [x for line in lines for x, _ in line.points]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    elif first < NEAR_ZERO * last:
        first = 0.0
    x = Axis(max(first, 1.0) if is_log else first, last, is_log=is_log, format=lambda value: f"{value:,.0f}")
    if not is_log and x.high >= 10_000:
        x = Axis(x.low, x.high, format=lambda value: re.sub(r"\.0(?=[KMBT])", "", format_amount(value)))
    y = make_axis(values, format_y, is_log=is_log or is_log_y, from_zero=from_zero)
    return Chart(lines, x, y, title, marks)


def _draw_both(chart: Chart) -> tuple[str, str]:
    return chart.draw(WIDE, WIDE_HEIGHT), chart.draw(NARROW, NARROW_HEIGHT)


def _make_band(series: Series, *, is_log: bool = False) -> list[tuple[float, float, float]]:
    """Returns the extremes of neighbouring points, so that no spike is lost however narrow the plot."""
    size = math.ceil(len(series.groups) / MAX_BAND) if series.groups else 1
    band = []
    for start in range(0, len(series.groups), size):
        chunk = series.groups[start : start + size]
        low, high = min(group.low for group in chunk), max(group.high for group in chunk)
        if not is_log or (low > 0 and chunk[-1].last >= 1):
            band.append((float(chunk[-1].last), low, high))
    return band


def _limit_to_positive(points: Points, *, is_log: bool) -> list[tuple[float, float]]:
    """Returns the points that the axes can show."""
    return [(x, y) for x, y in points if not is_log or (x >= 1 and y > 0)]


def _find_stride(series: Series) -> int:
    return math.ceil(len(series.groups) / MAX_BAND)
