"""The steps of a trial, and what their times tell of the run's own steps.

A trial's steps are shorter than the run's where that accumulates many micro-batches: some steps of one micro-batch
and some of a few tell apart what a micro-batch takes and what the rest of a step does, and so how long the run's own
step would take. So no batch gains from an update that it only seems to pay for more seldom.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from gptmill.config.run import RunConfig

SLOW_STEPS = 5  # at the start, which say nothing of the speed
FEW_MICRO_BATCHES = 3
SPARE = 10  # times as many steps as are wanted: a trial is ended from outside, before it would evaluate and save
MIN_FOR_QUARTERS = 4  # steps
UNEVEN = 0.2  # share of the median by which the quarters of the steps differ, on a machine that is busy otherwise


@dataclass(frozen=True)
class TrialPlan:
    """The steps of one trial: all of `many` micro-batches, or some of one before."""

    micro_tokens: int
    accumulated: int
    """Micro-batches in a step of the run."""
    many: int
    """In a step of the trial."""
    steps: int
    """Counted, of each kind."""

    @property
    def has_two_kinds(self) -> bool:
        return self.many < self.accumulated

    @property
    def last_of_one(self) -> int:
        """The last step of a single micro-batch; 0 where there are none."""
        return SLOW_STEPS + self.steps if self.has_two_kinds else 0

    @property
    def last_step(self) -> int:
        return self.last_of_one + SLOW_STEPS + self.steps

    def list_flags(self) -> dict[str, Any]:
        last = self.last_step * SPARE
        return {
            "total_batch_size": self.many * self.micro_tokens,
            "batch_size_warmup": f"{self.micro_tokens}:{self.last_of_one}" if self.has_two_kinds else None,
            "max_steps": last,
            "steps_per_epoch": last,
            "checkpoint_freq": last,
            "eval_freq": last,
        }

    def estimate_speed(self, step_seconds: dict[int, float]) -> float:
        """Tokens per second of the run's own steps, from the seconds of each step of the trial."""
        long = statistics.median(self.list_counted(step_seconds, self.last_of_one))
        if not self.has_two_kinds:
            return self.many * self.micro_tokens / long
        short = statistics.median(self.list_counted(step_seconds, 0))
        share = long / self.many
        # Steps that differ among themselves do not tell what they differ by from others.
        apart = share if self.is_uneven(step_seconds) else (long - short) / (self.many - 1)
        micro_seconds = min(max(apart, share / 2), share)  # noise knows no such bounds
        seconds = long + (self.accumulated - self.many) * micro_seconds
        return self.accumulated * self.micro_tokens / seconds

    def is_uneven(self, step_seconds: dict[int, float]) -> bool:
        """Whether steps that should take the same time do not."""
        if self.steps < MIN_FOR_QUARTERS:
            return False
        kinds = {0, self.last_of_one}
        quarters = (statistics.quantiles(self.list_counted(step_seconds, before), n=4) for before in kinds)
        return any(high - low > UNEVEN * median for low, median, high in quarters)

    def list_counted(self, step_seconds: dict[int, float], before: int) -> list[float]:
        """The seconds of the steps that count, of those after a step."""
        first = before + SLOW_STEPS + 1
        return [step_seconds[step] for step in range(first, first + self.steps)]


def plan_trial(config: RunConfig, mini_batch_size: int, ranks: int, steps: int) -> TrialPlan:
    """The steps that tell how fast the run would be with so large micro-batches."""
    micro_tokens = mini_batch_size * config.model.context_length
    accumulated = config.training.total_batch_size // (micro_tokens * ranks)
    return TrialPlan(micro_tokens, accumulated, min(accumulated, FEW_MICRO_BATCHES), steps)
