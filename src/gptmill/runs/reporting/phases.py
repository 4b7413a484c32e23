"""The phases of a run, read from its logged learning rates: warm-up, main and decay.

Decay is what follows a stable learning rate, as in WSD; of a rate that always falls, the steps below half its peak.
A plug-in's schedule, and one that a restart changed, are read as well as the built-in ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptmill.runs.reporting.record import RunRecord, find_elapsed
from gptmill.runs.reporting.series import Group, compute_mean, compute_median

AT_PEAK = 0.999
STABLE_FRACTION = 0.05  # of all planned steps; fewer at the peak are the flat top of a cosine
SMOOTHED_FRACTION = 0.1  # of a phase, at each end, whose mean is its loss there


@dataclass(frozen=True)
class Phase:
    """A stretch of steps, from after `first` up to `last`."""

    name: str
    first_step: int
    last_step: int
    lr_range: tuple[float, float]
    train_loss: tuple[float, float] | None
    """At the beginning and at the end, smoothed."""
    val_loss: float | None
    """The last one in the phase."""
    tokens_per_second: float | None
    seconds: float


def find_phases(record: RunRecord) -> list[Phase]:
    """Returns the phases in order; none if no learning rate was logged."""
    rates = record.curves["lr"].groups
    if not rates or rates[-1].last <= rates[0].first:
        return []
    peak = max(group.high for group in rates)
    at_peak = [group for group in rates if group.high >= AT_PEAK * peak]
    warm, first, last = at_peak[0].last, rates[0].first, rates[-1].last
    planned = max([last, *(start.max_steps for start in record.starts[-1:])])
    stable_end = at_peak[-1].last
    if stable_end - warm < STABLE_FRACTION * planned:
        stable_end = max(group.last for group in rates if group.high >= peak / 2)
    spans = [("warm-up", first, warm), ("main", warm + 1, stable_end), ("decay", stable_end + 1, last)]
    if warm == first:  # no warm-up
        spans = [("main", first, stable_end), spans[2]]
    return [_make_phase(record, name, start, end) for name, start, end in spans if end > start]


def _make_phase(record: RunRecord, name: str, first: int, last: int) -> Phase:
    rates, losses = (record.curves[metric].slice(first, last) for metric in ("lr", "loss"))
    speeds = record.curves["tokens_per_second"].slice(first, last)
    evaluated = [item.loss for item in record.evaluations if first <= item.step <= last and math.isfinite(item.loss)]
    return Phase(
        name,
        first,
        last,
        lr_range=(rates[0].mean, rates[-1].mean) if rates else (math.nan, math.nan),
        train_loss=_find_ends(losses),
        val_loss=evaluated[-1] if evaluated else None,
        tokens_per_second=compute_median(speeds) if speeds else None,
        seconds=max(0.0, find_elapsed(record, last) - find_elapsed(record, first - 1)),
    )


def _find_ends(losses: list[Group]) -> tuple[float, float] | None:
    size = max(1, round(len(losses) * SMOOTHED_FRACTION))
    return (compute_mean(losses[:size]), compute_mean(losses[-size:])) if losses else None
