"""Chooses how the ranks share a model, where `--parallel` leaves it open."""

from __future__ import annotations

from gptmill.config.errors import UserError
from gptmill.config.run import ParallelName, RunConfig
from gptmill.runtime.world import World


def choose_strategy(config: RunConfig, world: World) -> ParallelName:
    """The requested strategy, or the cheapest that fits; the same on all ranks."""
    wanted = config.machine.parallel
    if wanted in ("auto", "ddp") or not world.is_distributed:
        return "ddp"
    raise UserError(f"--parallel {wanted} is not supported; use --parallel ddp")
