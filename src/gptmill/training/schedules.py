"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gptmill.config.optimizer import Constant, Cosine, OptimizerConfig, Wsd

SCHEDULES: dict[type, Callable[[int, int, Any], float]] = {}
"""Registered schedules by the type of their options. Each gets the steps done since warm-up, how many there are after
it, and its options, and returns the learning rate as a factor of max_lr."""


def make_lr(steps_done: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of the next update: linear warm-up from max_lr / warmup_steps, then the schedule's decay."""
    max_lr, schedule, warmup_steps = config.max_lr, config.schedule, config.warmup_steps
    if steps_done < warmup_steps:
        return max_lr * (steps_done + 1) / warmup_steps
    if (own := SCHEDULES.get(type(schedule))) is not None:
        return max_lr * float(own(steps_done - warmup_steps, max(1, max_steps - warmup_steps), schedule))
    if isinstance(schedule, Constant):
        return max_lr
    if steps_done >= max_steps:
        return schedule.min_lr
    if isinstance(schedule, Cosine):
        # The formula of GPT-2's reproductions: min_lr would be the rate of the update after the last one.
        progress = (steps_done - warmup_steps) / (max_steps - warmup_steps)
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        # If warm-up reaches into WSD's decay phase, there is no stable phase and the decay is shorter.
        stable_end = max_steps - round(schedule.decay_fraction * max_steps) if isinstance(schedule, Wsd) else 0
        factor = make_linear_factor(steps_done, max(warmup_steps, stable_end), max_steps)
    return schedule.min_lr + factor * (max_lr - schedule.min_lr)


def make_linear_factor(steps_done: int, decay_start: int, max_steps: int) -> float:
    """Falls from 1 in the last update before the decay, or in the first of all, to 0 in the last update."""
    peak = max(decay_start - 1, 0)
    if steps_done <= peak:
        return 1.0
    return 1.0 - (steps_done - peak) / (max_steps - 1 - peak)
