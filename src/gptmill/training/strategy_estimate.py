"""What each strategy of several GPUs takes: memory, communication, time and cost; and the cheapest that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gptmill.config.hardware import USABLE_SHARE
from gptmill.config.parallel_relations import shares_more_than_data
from gptmill.config.relations import SHARDABLE_OPTIMIZERS
from gptmill.config.run import ParallelName, RunConfig
from gptmill.runtime.interconnects import Interconnect
from gptmill.training.communication import RINGS, CollectiveKind, StepCommunication, plan_communication
from gptmill.training.memory_estimate import FP32, HALF, HALF_PRECISIONS
from gptmill.training.plan import TrainPlan
from gptmill.training.split_communication import plan_split_communication
from gptmill.training.split_memory import estimate_split_memory, split_units
from gptmill.training.strategy_memory import ShardedUnits, StrategyMemory, estimate_strategy_memory
from gptmill.training.time_estimate import TimeEstimate

STRATEGIES: tuple[ParallelName, ...] = ("ddp", "zero1", "fsdp", "hsdp")  # equal costs: the first one is simpler


@dataclass(frozen=True)
class StrategyTime:
    """Seconds of one step, and what follows from them."""

    compute_seconds: float
    communication_seconds: float
    """Hidden or not."""
    exposed_seconds: float
    """The part of it in which nothing is computed."""
    tokens_per_second: float
    mfu: float | None
    run: TimeEstimate
    """The whole run, communication included."""

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


@dataclass(frozen=True)
class StrategyEstimate:
    """What one strategy takes."""

    strategy: ParallelName
    memory: StrategyMemory
    fits: bool | None
    """None if the memory of the GPU is unknown."""
    sent_bytes: dict[CollectiveKind, float]
    """By each rank in a step."""
    savers: int
    """Ranks that save a checkpoint together, each its part."""
    time: StrategyTime | None
    """None where the time of the computation is unknown."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        time = self.time and {
            **asdict(self.time),
            "step_seconds": self.time.step_seconds,
            "seconds": self.time.run.total,
        }
        return {
            "strategy": self.strategy,
            "fits": self.fits,
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "sent_bytes": self.sent_bytes,
            "time": time,
        }


@dataclass(frozen=True)
class PlannedCluster:
    """Where a run is planned to train."""

    links: Interconnect
    memory_bytes: int | None
    """Of one GPU; None if unknown."""
    alone: TimeEstimate | None
    """The run's time without communication; None if unknown."""

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_bytes is None else USABLE_SHARE * self.memory_bytes


def estimate_strategies(
    config: RunConfig, plan: TrainPlan, units: ShardedUnits, cluster: PlannedCluster
) -> tuple[StrategyEstimate, ...]:
    """Every strategy that these GPUs can use; only copies where ranks share layers, windows or experts."""
    if shares_more_than_data(config.machine):
        return (_estimate_split(config, plan, units, cluster),)
    names = _list_strategies(cluster.links, can_shard=config.optimizer.optimizer.tag in SHARDABLE_OPTIMIZERS)
    return tuple(_estimate(name, config, plan, units, cluster) for name in names)


def _list_strategies(links: Interconnect, *, can_shard: bool) -> list[ParallelName]:
    """Hybrid sharding needs several machines with several GPUs each; otherwise it is one of the others."""
    is_hybrid = links.nodes > 1 and links.gpus_per_node > 1
    left_out = {*(() if is_hybrid else ("hsdp",)), *(() if can_shard else ("fsdp", "hsdp"))}
    return [name for name in STRATEGIES if name not in left_out]


def _estimate(
    strategy: ParallelName, config: RunConfig, plan: TrainPlan, units: ShardedUnits, cluster: PlannedCluster
) -> StrategyEstimate:
    links = cluster.links
    shards = links.gpus_per_node if strategy == "hsdp" else links.gpus
    savers = shards if strategy in ("fsdp", "hsdp") else 1
    # Whole gradients of a sharded model are summed once per step where there is memory for them.
    holds = strategy in ("fsdp", "hsdp") and plan.micro_batches > 1
    memory = estimate_strategy_memory(strategy, config, plan, units, shards, holds_gradients=holds)
    if holds and memory.total > cluster.usable_bytes:
        holds = False
        memory = estimate_strategy_memory(strategy, config, plan, units, shards)
    number = HALF if plan.precision in HALF_PRECISIONS else FP32
    sent = plan_communication(strategy, units, number, links, holds_gradients=holds)
    return _make_estimate(strategy, plan, memory, sent, savers, cluster)


def _estimate_split(
    config: RunConfig, plan: TrainPlan, units: ShardedUnits, cluster: PlannedCluster
) -> StrategyEstimate:
    own = split_units(units, config.machine)
    memory = estimate_split_memory(config, plan, own)
    sent = plan_split_communication(config, plan, own, cluster.links)
    savers = config.machine.tensor_parallel * config.machine.expert_parallel
    return _make_estimate("ddp", plan, memory, sent, savers, cluster)


def _make_estimate(
    strategy: ParallelName,
    plan: TrainPlan,
    memory: StrategyMemory,
    sent: StepCommunication,
    savers: int,
    cluster: PlannedCluster,
) -> StrategyEstimate:
    time, alone = None, cluster.alone
    if alone is not None:
        compute = plan.tokens_per_step / alone.tokens_per_second
        exposed = sent.count_exposed_seconds(compute, plan.micro_batches)
        time = _slow_down(alone, compute, sent.count_seconds(plan.micro_batches), exposed, savers)
    return StrategyEstimate(
        strategy,
        memory,
        None if cluster.memory_bytes is None else memory.total <= cluster.usable_bytes,
        {kind: sent.count_sent(kind, plan.micro_batches) for kind in RINGS},
        savers,
        time,
    )


def _slow_down(alone: TimeEstimate, compute: float, communication: float, exposed: float, savers: int) -> StrategyTime:
    """The time of a run whose steps also communicate, and whose checkpoints so many ranks save together.

    Evaluations communicate too, but little.
    """
    slower = (compute + exposed) / compute
    mfu = None if alone.mfu is None else alone.mfu / slower
    run = replace(
        alone,
        training=alone.training * slower,
        checkpoints=alone.checkpoints / savers,
        tokens_per_second=alone.tokens_per_second / slower,
        mfu=mfu,
    )
    return StrategyTime(compute, communication, exposed, run.tokens_per_second, mfu, run)


def choose_estimate(estimates: Sequence[StrategyEstimate], wanted: ParallelName = "auto") -> StrategyEstimate:
    """The strategy asked for; else the fastest that fits, which is the cheapest; else the one that needs the least."""
    if wanted != "auto":
        return next((each for each in estimates if each.strategy == wanted), estimates[-1])
    fitting = [each for each in estimates if each.fits is not False]
    if not fitting:
        return min(estimates, key=lambda each: each.memory.total)
    return min(fitting, key=lambda each: each.time.step_seconds if each.time else 0.0)
