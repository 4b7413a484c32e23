"""Chooses how the ranks share a model, where `--parallel` leaves it open."""

from __future__ import annotations

from gptmill.config.errors import UserError
from gptmill.config.run import ParallelName, RunConfig
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan


def choose_strategy(config: RunConfig, world: World) -> ParallelName:
    """The requested strategy, or the cheapest that fits; the same on all ranks."""
    wanted = config.machine.parallel
    if wanted == "zero1" and world.is_distributed:
        raise UserError("parallel = zero1 is not built yet; use --parallel ddp or --parallel fsdp")
    return "ddp" if wanted == "auto" or not world.is_distributed else wanted


def can_hold_gradients(config: RunConfig, plan: TrainPlan, world: World) -> bool:
    return True
