"""The steps of a trial, and the throughput of the run extrapolated from them.

A trial accumulates fewer micro-batches per step than the run. Some steps of one micro-batch and some of a few separate
the time of a micro-batch from that of the optimizer update, which gives the time of the run's own step. So no
batch size looks faster only because its trial amortises the update over more tokens.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from gptmill.config.run import RunConfig

WARM_UP_STEPS = 5
MAX_MICRO_BATCHES = 3
MAX_STEPS_FACTOR = 10  # times the needed steps: a trial is killed before it would evaluate and save
MIN_QUARTILE_STEPS = 4
NOISY_SPREAD = 0.2  # interquartile range of the step times over their median, as on a busy machine


@dataclass(frozen=True)
class TrialPlan:
    """The steps of one trial, each of `micro_batches`, after some short steps of one if the run accumulates more."""

    micro_batch_tokens: int
    run_micro_batches: int
    """Gradient accumulation steps of the run."""
    micro_batches: int
    """Gradient accumulation steps of the trial."""
    steps: int
    """Measured steps, of each kind."""

    @property
    def has_short_steps(self) -> bool:
        return self.micro_batches < self.run_micro_batches

    @property
    def last_short_step(self) -> int:
        """The last step of a single micro-batch; 0 if there are none."""
        return WARM_UP_STEPS + self.steps if self.has_short_steps else 0

    @property
    def last_step(self) -> int:
        return self.last_short_step + WARM_UP_STEPS + self.steps

    def list_flags(self) -> dict[str, Any]:
        last = self.last_step * MAX_STEPS_FACTOR
        return {
            "total_batch_size": self.micro_batches * self.micro_batch_tokens,
            "batch_size_warmup": f"{self.micro_batch_tokens}:{self.last_short_step}" if self.has_short_steps else None,
            "max_steps": last,
            "steps_per_epoch": last,
            "checkpoint_freq": last,
            "eval_freq": last,
        }

    def estimate_speed(self, step_seconds: dict[int, float]) -> float:
        """Estimates the run's tokens per second from the seconds of each step of the trial."""
        long = statistics.median(self.list_measured(step_seconds, self.last_short_step))
        if not self.has_short_steps:
            return self.micro_batches * self.micro_batch_tokens / long
        short = statistics.median(self.list_measured(step_seconds, 0))
        mean = long / self.micro_batches
        # The difference of noisy steps is not meaningful.
        marginal = mean if self.is_noisy(step_seconds) else (long - short) / (self.micro_batches - 1)
        micro_batch_seconds = min(max(marginal, mean / 2), mean)  # limits the effect of noise
        seconds = long + (self.run_micro_batches - self.micro_batches) * micro_batch_seconds
        return self.run_micro_batches * self.micro_batch_tokens / seconds

    def is_noisy(self, step_seconds: dict[int, float]) -> bool:
        """Whether the times of equal steps have a large spread."""
        if self.steps < MIN_QUARTILE_STEPS:
            return False
        starts = {0, self.last_short_step}
        quartiles = (statistics.quantiles(self.list_measured(step_seconds, start), n=4) for start in starts)
        return any(high - low > NOISY_SPREAD * median for low, median, high in quartiles)

    def list_measured(self, step_seconds: dict[int, float], start: int) -> list[float]:
        """Returns the seconds of the measured steps after step `start` and its warm-up."""
        first = start + WARM_UP_STEPS + 1
        return [step_seconds[step] for step in range(first, first + self.steps)]


def plan_trial(config: RunConfig, mini_batch_size: int, ranks: int, steps: int) -> TrialPlan:
    """Plans the steps that measure the run's throughput at this micro-batch size."""
    micro_batch_tokens = mini_batch_size * config.model.context_length
    run_micro_batches = config.training.total_batch_size // (micro_batch_tokens * ranks)
    return TrialPlan(micro_batch_tokens, run_micro_batches, min(run_micro_batches, MAX_MICRO_BATCHES), steps)
