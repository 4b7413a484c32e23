"""How long a training step takes on this machine, as a function of its FLOPs, from a few measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MeasuredStep:
    """A step of some model."""

    flops: float
    """Of the blocks."""
    seconds: float
    head_flops: float = 0.0
    """Of the LM head: one large GEMM, which is faster than as many FLOPs in small blocks."""


@dataclass(frozen=True)
class SpeedModel:
    """Interpolates between measured steps on logarithmic scales: small steps are mostly overhead, large ones FLOPs.

    Below the smallest one, a step takes as long as that; beyond the largest one, it has the same FLOP/s. The LM head
    comes on top.
    """

    steps: tuple[MeasuredStep, ...]
    """Without their heads."""
    head_seconds_per_flop: float = 0.0

    @property
    def largest_flops(self) -> float:
        return self.steps[-1].flops

    def find_seconds(self, flops: float, head_flops: float = 0.0) -> float:
        return self._find_block_seconds(flops) + head_flops * self.head_seconds_per_flop

    def _find_block_seconds(self, flops: float) -> float:
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
    """Sorted by FLOPs; a step that took less than a smaller one is noise and takes as long.

    Of steps that were measured several times, the fastest counts.
    """
    fastest: dict[tuple[float, float], MeasuredStep] = {}
    for step in sorted(steps, key=lambda step: step.seconds):
        fastest.setdefault((step.flops, step.head_flops), step)
    steps = list(fastest.values())
    head_rate = _find_head_rate(steps)
    rising: list[MeasuredStep] = []
    for step in sorted(steps, key=lambda step: (step.flops, step.head_flops)):
        own = step.seconds - step.head_flops * head_rate
        seconds = max(own, rising[-1].seconds) if rising else own
        if not rising or step.flops > rising[-1].flops:
            rising.append(replace(step, seconds=seconds, head_flops=0.0))
    return SpeedModel(tuple(rising), head_rate)


def _find_head_rate(steps: Sequence[MeasuredStep]) -> float:
    """Seconds per FLOP of the head, by two steps that differ in it alone; else as of the step with most FLOP/s."""
    for one in steps:
        for other in steps:
            if one.flops == other.flops and one.head_flops < other.head_flops:
                rate = (other.seconds - one.seconds) / (other.head_flops - one.head_flops)
                # A head costs something, and no step is all head: measured times are noisy.
                return min(max(rate, 0.0), one.seconds / 2 / max(one.head_flops, 1.0))
    return min((step.seconds / (step.flops + step.head_flops) for step in steps), default=0.0)
