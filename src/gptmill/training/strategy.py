"""Chooses how the ranks share a model, where `--parallel` leaves it open: the cheapest way that fits into memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from gptmill.config.hardware import USABLE_SHARE
from gptmill.config.parallel_relations import shares_more_than_data
from gptmill.config.relations import SHARDABLE_OPTIMIZERS
from gptmill.config.run import ParallelName, RunConfig
from gptmill.runtime.memory import read_device_memory, read_host_memory
from gptmill.runtime.parallel.mesh import SHARD, read_local_size
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.strategy_memory import build_units, estimate_strategy_memory

ORDER: tuple[ParallelName, ...] = ("ddp", "zero1", "fsdp")
"""Each sends more than the one before, or in more pieces, and needs less memory."""


def choose_strategy(config: RunConfig, world: World, make_plan: Callable[[], TrainPlan]) -> ParallelName:
    """The requested strategy, or the cheapest that fits; the same on all ranks."""
    wanted = config.machine.parallel
    if not world.is_distributed or shares_more_than_data(config.machine):
        return "ddp"
    if config.machine.exact_ranks:
        return "zero1"  # in its own order of addition
    if wanted != "auto":
        return wanted
    return "ddp" if world.size == 1 else find_cheapest(config, make_plan(), world)


def find_cheapest(config: RunConfig, plan: TrainPlan, world: World) -> ParallelName:
    """The first strategy that fits by estimate on every rank; else the one that needs the least memory."""
    units, usable = build_units(config, plan), USABLE_SHARE * read_rank_memory(world)
    can_shard = config.optimizer.optimizer.tag in SHARDABLE_OPTIMIZERS
    *cheaper, last = ORDER if can_shard else ORDER[:-1]
    for strategy in cheaper:
        needed = estimate_strategy_memory(strategy, config, plan, units, world.size).total
        if not world.any_rank(needed > usable):
            return strategy
    return last


def can_hold_gradients(config: RunConfig, plan: TrainPlan, world: World) -> bool:
    """Whether ranks that shard gradients have memory for whole ones over the micro-batches of a step, which then send
    them once instead of once each."""
    shards, units = world.axis_size(SHARD), build_units(config, plan)
    needed = estimate_strategy_memory(world.strategy, config, plan, units, shards, holds_gradients=True).total
    return not world.any_rank(needed > USABLE_SHARE * read_rank_memory(world))


def read_rank_memory(world: World) -> float:
    """Bytes of this rank's GPU, or its share of the host's memory; infinite if unknown."""
    if world.device.type == "cuda":
        return read_device_memory(world.device) or math.inf
    return (read_host_memory() or math.inf) / read_local_size(world.size)
