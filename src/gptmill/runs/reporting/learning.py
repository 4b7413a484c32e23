"""What a run learned: initial and final loss, the best one, and the step that captured 90 % of the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptmill.runs.events import make_perplexity
from gptmill.runs.reporting.record import Evaluation, RunRecord, find_elapsed

MOST_OF_THE_GAIN = 0.9
MAX_ROWS = 16


@dataclass(frozen=True)
class Point:
    """A loss, at a step, after so much training time."""

    step: int
    loss: float
    elapsed_seconds: float

    @property
    def perplexity(self) -> float:
        return make_perplexity(self.loss)


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
class LossChange:
    """One kind of loss from its first value to its last; they are the same where there is one."""

    kind: str
    """training (smoothed), training windows (evaluated), or validation."""
    first: Point
    last: Point
    best: Point

    @property
    def improvement(self) -> float:
        """The decrease as a fraction of the first loss."""
        return (self.first.loss - self.last.loss) / self.first.loss if self.first.loss else 0.0


@dataclass(frozen=True)
class TimelineRow:
    """One evaluation."""

    point: Point
    checkpoint: str
    """Folder of the checkpoint saved at this step; empty without one."""
    is_best: bool


def find_learning(record: RunRecord) -> Learning | None:
    """Returns None if fewer than two losses are finite."""
    kind, points, not_finite = "validation", *_list_evaluated(record.evaluations)
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
    points, _ = _list_evaluated(record.evaluations)
    best = min(points, key=lambda point: point.loss, default=None)
    if len(points) > MAX_ROWS:
        chosen = {round(row * (len(points) - 1) / (MAX_ROWS - 1)) for row in range(MAX_ROWS)}
        points = [point for number, point in enumerate(points) if number in chosen or point is best]
    return [TimelineRow(point, record.checkpoints.get(point.step, ("", 0))[0], point is best) for point in points]


def find_loss_changes(record: RunRecord) -> list[LossChange]:
    """Returns how each kind of loss changed, of those that were logged."""
    kinds = {
        "training": _list_trained(record),
        "training windows": _list_evaluated(record.train_evaluations)[0],
        "validation": _list_evaluated(record.evaluations)[0],
    }
    return [
        LossChange(kind, points[0], points[-1], min(points, key=lambda point: point.loss))
        for kind, points in kinds.items()
        if points
    ]


def _list_evaluated(evaluations: list[Evaluation]) -> tuple[list[Point], int]:
    by_step = {item.step: Point(item.step, item.loss, item.elapsed_seconds) for item in evaluations}
    finite = [point for point in by_step.values() if math.isfinite(point.loss)]
    return sorted(finite, key=lambda point: point.step), len(by_step) - len(finite)


def _list_trained(record: RunRecord) -> list[Point]:
    smooth = record.curves["loss"].smooth()
    return [Point(round(step), loss, find_elapsed(record, round(step))) for step, loss in smooth]
