"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math

from gptmill.config.optimizer import Constant, Cosine, Linear, OptimizerConfig, Wsd


def make_lr(steps_done: int, config: OptimizerConfig, max_steps: int) -> float:
    """The rate of the next update: linear warm-up from max_lr / warmup_steps, then the course of the schedule."""
    max_lr, schedule, begin = config.max_lr, config.schedule, config.warmup_steps
    if steps_done < begin:
        return max_lr * (steps_done + 1) / begin
    if isinstance(schedule, Constant):
        return max_lr
    if steps_done >= max_steps:
        return schedule.min_lr
    if isinstance(schedule, Wsd):
        # Where warm-up reaches into the last stretch nothing is stable, and the rate decays in what is left.
        begin = max(begin, max_steps - round(schedule.decay_fraction * max_steps))
        if steps_done < begin:
            return max_lr
    share = make_share(schedule, (steps_done - begin) / (max_steps - begin))
    return schedule.min_lr + share * (max_lr - schedule.min_lr)


def make_share(schedule: Cosine | Linear | Wsd, ratio: float) -> float:
    """How much is left of the way from max_lr down to min_lr, `ratio` of it being behind."""
    if isinstance(schedule, Cosine):
        return 0.5 * (1.0 + math.cos(math.pi * ratio))
    return 1.0 - ratio
