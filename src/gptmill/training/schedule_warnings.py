"""Warnings about a learning-rate schedule that a user may not expect, with the numbers."""

from __future__ import annotations

from gptmill.config.optimizer import OptimizerConfig
from gptmill.config.run import RunConfig
from gptmill.runs.events import Warned
from gptmill.training.plan import TrainPlan
from gptmill.training.resume_point import ResumePoint
from gptmill.training.schedules import make_lr
from gptmill.training.state import TrainState


def warn_of_schedule(
    config: RunConfig, plan: TrainPlan, state: TrainState, resume_point: ResumePoint | None
) -> list[Warned]:
    """What to say before the first step of a process, given the checkpoint that it starts from, if any."""
    before = None
    if resume_point is not None and (training := resume_point.read_training()) is not None:
        before = plan.find_max_steps(training, state.step, state.windows_read - state.windows_jumped)
    warnings = find_schedule_warnings(config.optimizer, plan.max_steps, state.step, before)
    return [Warned(state.step, "schedule", text) for text in warnings]


def find_schedule_warnings(
    config: OptimizerConfig, max_steps: int, steps_done: int = 0, max_steps_before: int | None = None
) -> list[str]:
    """What a user may not expect of the learning rate in a new run, or where a resumed one has other `max_steps`."""
    if max_steps == max_steps_before:
        return []
    warnings = []
    if max_steps < config.warmup_steps:
        last_lr = make_lr(max_steps - 1, config, max_steps)
        warnings.append(
            f"max_steps {max_steps:,} ends within warmup_steps {config.warmup_steps:,}: the learning rate only rises, "
            f"to {last_lr:.3g} of max_lr {config.max_lr:g}; lower --warmup_steps, or raise --max_steps"
        )
    if max_steps_before is not None:
        before, after = (f"{make_lr(steps_done, config, steps):.3g}" for steps in (max_steps_before, max_steps))
        if before != after:
            warnings.append(
                f"max_steps {max_steps:,} instead of {max_steps_before:,} reshapes the {config.schedule.tag} schedule: "
                f"the learning rate after step {steps_done:,} is {after} instead of {before}"
            )
    return warnings
