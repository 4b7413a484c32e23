"""How long a training step takes on this machine, as a function of its FLOPs, from a few measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredStep:
    """A step of some model."""

    flops: float
    seconds: float


@dataclass(frozen=True)
class SpeedModel:
    """Interpolates between measured steps on logarithmic scales: small steps are mostly overhead, large ones FLOPs.

    Below the smallest one, a step takes as long as that; beyond the largest one, it has the same FLOP/s.
    """

    steps: tuple[MeasuredStep, ...]

    @property
    def largest_flops(self) -> float:
        return self.steps[-1].flops

    def find_seconds(self, flops: float) -> float:
        first, last = self.steps[0], self.steps[-1]
        if flops <= first.flops:
            return first.seconds
        if flops >= last.flops:
            return last.seconds * flops / last.flops
        above = next(number for number, step in enumerate(self.steps) if step.flops >= flops)
        low, high = self.steps[above - 1], self.steps[above]
        share = math.log(flops / low.flops) / math.log(high.flops / low.flops)
        return float(low.seconds * (high.seconds / low.seconds) ** share)


def make_speed_model(steps: Sequence[MeasuredStep]) -> SpeedModel:
    """Sorted by FLOPs; a step that took less than a smaller one is noise and takes as long."""
    rising: list[MeasuredStep] = []
    for step in sorted(steps, key=lambda step: step.flops):
        seconds = max(step.seconds, rising[-1].seconds) if rising else step.seconds
        if not rising or step.flops > rising[-1].flops:
            rising.append(MeasuredStep(step.flops, seconds))
    return SpeedModel(tuple(rising))
