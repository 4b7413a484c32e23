"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

from gptmill.config.optimizer import Constant, Cosine, Linear, OptimizerConfig, Wsd


def make_lr(steps_done: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of the next update: linear warm-up from max_lr / warmup_steps, then the schedule's decay."""
    max_lr, schedule, decay_start = config.max_lr, config.schedule, config.warmup_steps
    if steps_done < decay_start:
        return max_lr * (steps_done + 1) / decay_start
    if isinstance(schedule, Constant):
        return max_lr
    if steps_done >= max_steps:
        return schedule.min_lr
    if isinstance(schedule, Wsd):
        # If warm-up reaches into the decay phase, there is no stable phase and the decay is shorter.
        decay_start = max(decay_start, max_steps - round(schedule.decay_fraction * max_steps))
        if steps_done < decay_start:
            return max_lr
    factor = make_decay_factor(schedule, (steps_done - decay_start) / (max_steps - decay_start))
    return schedule.min_lr + factor * (max_lr - schedule.min_lr)


def make_decay_factor(schedule: Cosine | Linear | Wsd, progress: float) -> float:
    """Falls from 1 (max_lr) to 0 (min_lr) as `progress` goes from 0 to 1."""
    if isinstance(schedule, Cosine):
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress
