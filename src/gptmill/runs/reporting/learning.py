"""What a run learned: initial and final loss, the best one, and the step that captured 90 % of the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptmill.runs.reporting.record import RunRecord, find_elapsed

MOST_OF_THE_GAIN = 0.9
MAX_ROWS = 16
MAX_EXPONENT = 700.0


@dataclass(frozen=True)
class Point:
    """A loss, at a step, after so much training time."""

    step: int
    loss: float
    elapsed_seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, MAX_EXPONENT))


@dataclass(frozen=True)
class Learning:
    """From the first loss to the last."""

    kind: str
    """validation, or training (smoothed) if the run was never evaluated twice."""
    initial: Point
    final: Point
    best: Point
    most: Point | None
    """The first with at least 90 % of the gain from the initial to the best loss; None if there was no gain."""
    not_finite: int
    """Losses that were not finite, and are left out."""

    @property
    def improvement(self) -> float:
        """The decrease of the loss as a fraction of the initial one."""
        return (self.initial.loss - self.final.loss) / self.initial.loss if self.initial.loss else 0.0


@dataclass(frozen=True)
class TimelineRow:
    """One evaluation."""

    point: Point
    checkpoint: str
    """Folder of the checkpoint saved at this step; empty without one."""
    is_best: bool


def find_learning(record: RunRecord) -> Learning | None:
    """Returns None if fewer than two losses are finite."""
    kind, points, not_finite = "validation", *_list_evaluated(record)
    if len(points) < 2:
        kind, points, not_finite = "training", _list_trained(record), record.curves["loss"].not_finite
    if len(points) < 2:
        return None
    best = min(points, key=lambda point: point.loss)
    gain = points[0].loss - best.loss
    most = [point for point in points if gain > 0 and points[0].loss - point.loss >= MOST_OF_THE_GAIN * gain]
    return Learning(kind, points[0], points[-1], best, most[0] if most else None, not_finite)


def make_timeline(record: RunRecord) -> list[TimelineRow]:
    """Returns the evaluations, thinned out evenly if there are many; the best one is always there."""
    points, _ = _list_evaluated(record)
    best = min(points, key=lambda point: point.loss, default=None)
    if len(points) > MAX_ROWS:
        chosen = {round(row * (len(points) - 1) / (MAX_ROWS - 1)) for row in range(MAX_ROWS)}
        points = [point for number, point in enumerate(points) if number in chosen or point is best]
    return [TimelineRow(point, record.checkpoints.get(point.step, ("", 0))[0], point is best) for point in points]


def _list_evaluated(record: RunRecord) -> tuple[list[Point], int]:
    by_step = {item.step: Point(item.step, item.loss, item.elapsed_seconds) for item in record.evaluations}
    finite = [point for point in by_step.values() if math.isfinite(point.loss)]
    return sorted(finite, key=lambda point: point.step), len(by_step) - len(finite)


def _list_trained(record: RunRecord) -> list[Point]:
    smooth = record.curves["loss"].smooth()
    return [Point(round(step), loss, find_elapsed(record, round(step))) for step, loss in smooth]
