"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math

from gptmill.config.run import OptimizerConfig


def make_lr(steps_done: int, config: OptimizerConfig, max_steps: int) -> float:
    """The rate of the next update: linear warm-up from max_lr / warmup_steps, then cosine decay to min_lr."""
    if steps_done < config.warmup_steps:
        return config.max_lr * (steps_done + 1) / config.warmup_steps
    if steps_done >= max_steps:
        return config.schedule.min_lr
    ratio = (steps_done - config.warmup_steps) / (max_steps - config.warmup_steps)
    return config.schedule.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (config.max_lr - config.schedule.min_lr)
