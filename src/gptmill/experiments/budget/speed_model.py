"""How long a training step takes on this machine, by the FLOPs of a token, from a few measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredStep:
    """A step of some model."""

    tokens: int
    token_flops: float
    """Of the blocks, for each token."""
    seconds: float
    update_seconds: float = 0.0
    """Of these, the optimizer's, which do not depend on the tokens: Muon multiplies matrices for each weight."""
    head_flops: float = 0.0
    """Of the LM head, for each token: one large GEMM, which is faster than as many FLOPs in small blocks."""


@dataclass(frozen=True)
class SpeedPoint:
    """The cost of a model, without its head."""

    token_flops: float
    token_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class SpeedModel:
    """Interpolates between measured models on logarithmic scales: narrow ones are bound by memory, wide ones by FLOPs.

    A model below the smallest one takes as long as that; one beyond the largest has the same FLOP/s.
    """

    points: tuple[SpeedPoint, ...]
    head_seconds_per_flop: float = 0.0

    @property
    def largest_flops(self) -> float:
        return self.points[-1].token_flops

    def find_seconds(self, tokens: int, token_flops: float, head_flops: float = 0.0) -> float:
        """Of a step with so many tokens."""
        point = self._find_point(token_flops)
        return tokens * (point.token_seconds + head_flops * self.head_seconds_per_flop) + point.update_seconds

    def accelerate(self, factor: float) -> SpeedModel:
        """The speed of a machine that is faster by this factor, in all but the head: a GEMM, which is fast already."""
        points = [
            SpeedPoint(point.token_flops, point.token_seconds / factor, point.update_seconds / factor)
            for point in self.points
        ]
        return SpeedModel(tuple(points), self.head_seconds_per_flop)

    def _find_point(self, flops: float) -> SpeedPoint:
        first, last = self.points[0], self.points[-1]
        if flops <= first.token_flops:
            return first
        if flops >= last.token_flops:
            factor = flops / last.token_flops
            return SpeedPoint(flops, factor * last.token_seconds, factor * last.update_seconds)
        above = next(number for number, point in enumerate(self.points) if point.token_flops >= flops)
        low, high = self.points[above - 1], self.points[above]
        share = math.log(flops / low.token_flops) / math.log(high.token_flops / low.token_flops)
        seconds = low.token_seconds * (high.token_seconds / low.token_seconds) ** share
        return SpeedPoint(flops, seconds, low.update_seconds + share * (high.update_seconds - low.update_seconds))


def make_speed_model(steps: Sequence[MeasuredStep]) -> SpeedModel:
    """A model that took less than a smaller one is noise and takes as long.

    Of steps that were measured several times, the fastest counts.
    """
    fastest: dict[tuple[float, float], MeasuredStep] = {}
    for step in sorted(steps, key=lambda step: step.seconds):
        fastest.setdefault((step.token_flops, step.head_flops), step)
    steps = sorted(fastest.values(), key=lambda step: (step.token_flops, step.head_flops))
    head_rate = _find_head_rate(steps)
    rising: list[SpeedPoint] = []
    for step in steps:
        own = (step.seconds - step.update_seconds) / step.tokens - step.head_flops * head_rate
        seconds = max(own, rising[-1].token_seconds) if rising else own
        if not rising or step.token_flops > rising[-1].token_flops:
            rising.append(SpeedPoint(step.token_flops, seconds, step.update_seconds))
    return SpeedModel(tuple(rising), head_rate)


def _find_head_rate(steps: Sequence[MeasuredStep]) -> float:
    """Seconds per FLOP of the head, by two steps that differ in it alone; else as of the step with most FLOP/s."""
    for one in steps:
        for other in steps:
            if one.token_flops == other.token_flops and one.head_flops < other.head_flops:
                more_flops = other.tokens * (other.head_flops - one.head_flops)
                rate = (other.seconds - one.seconds) / more_flops
                # A head costs something, and no step is all head: measured times are noisy.
                most = (one.seconds - one.update_seconds) / 2 / max(one.tokens * one.head_flops, 1.0)
                return min(max(rate, 0.0), most)
    return min((step.seconds / step.tokens / (step.token_flops + step.head_flops) for step in steps), default=0.0)
