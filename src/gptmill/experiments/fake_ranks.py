"""Simulation: places a model on the ranks of a cluster that is not there, and compares its memory with the plan's.

Every rank is this process once, in torch's "fake" process group, whose collectives send nothing. The model is on the
meta device, which has shapes but no memory, and is sharded by the code that shards a real one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg as fake_pg  # the import registers the backend

from gptmill.config.durations import format_duration
from gptmill.config.errors import UserError
from gptmill.config.parallel_relations import count_sharing_ranks, shares_more_than_data
from gptmill.config.run import ParallelName, RunConfig
from gptmill.experiments.child_run import Say
from gptmill.models.gpt import GPT, build_meta_gpt
from gptmill.runtime.interconnects import Interconnect
from gptmill.runtime.parallel.layouts import Layout
from gptmill.runtime.parallel.local_shards import to_local
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.parallel.parallelize import parallelize
from gptmill.runtime.parallel.split_model import split_model
from gptmill.runtime.world import World
from gptmill.training.optimizers import OptimizerContainer, build_optimizer
from gptmill.training.optimizers.fsdp import build_fsdp_optimizer
from gptmill.training.optimizers.ownership import Ownership
from gptmill.training.plan import TrainPlan
from gptmill.training.strategy_estimate import StrategyEstimate

TOLERANCE = 0.01
META = torch.device("meta")
SECONDS_BETWEEN_REPORTS = 5.0
LOCAL_SIZE = "LOCAL_WORLD_SIZE"

LocalShapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlacedBytes:
    """What a rank holds from step to step."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Placement:
    """The planned bytes of a strategy beside those of the fake rank that holds most."""

    strategy: ParallelName
    ranks: int
    planned: PlacedBytes
    placed: PlacedBytes
    least_total: int
    """Of the rank that holds least."""

    @property
    def error(self) -> float:
        """The largest relative difference of a kind."""
        pairs = zip(asdict(self.planned).values(), asdict(self.placed).values(), strict=True)
        return max(float(abs(planned - placed) / max(1, placed)) for planned, placed in pairs)

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def simulate(
    config: RunConfig, plan: TrainPlan, links: Interconnect, estimates: Sequence[StrategyEstimate], say: Say
) -> tuple[Placement, ...]:
    """Places the model by each strategy that shards anything."""
    if "RANK" in os.environ or dist.is_initialized():
        raise UserError("--simulate makes its own ranks; run it without torchrun")
    if config.model.own_parts:
        raise UserError("--simulate places the built-in models, without memory; leave parts of plug-ins out")
    simulation = Simulation(config, plan, links, say)
    is_split = shares_more_than_data(config.machine)
    return tuple(simulation.place(estimate) for estimate in estimates if is_split or estimate.strategy != "ddp")


class Simulation:
    """A run's model on the ranks of a cluster."""

    def __init__(self, config: RunConfig, plan: TrainPlan, links: Interconnect, say: Say) -> None:
        self._config, self._plan, self._links, self._say = config, plan, links, say
        self._whole = self._build()
        # Optimizer state by the shapes of a rank's pieces, on which alone it depends: most ranks have the same.
        self._states: dict[LocalShapes, Mapping[str, int]] = {}

    def place(self, estimate: StrategyEstimate) -> Placement:
        """Compares what was planned with what the ranks hold."""
        ranks = self._list_ranks(estimate.strategy)
        started = said = time.monotonic()
        found: list[PlacedBytes] = []
        for done, rank in enumerate(ranks):
            now = time.monotonic()
            if now - said > SECONDS_BETWEEN_REPORTS:
                left = format_duration((now - started) / done * (len(ranks) - done))
                self._say(f"placed {estimate.strategy} on {done} of {len(ranks)} fake ranks, {left} left")
                said = now
            with open_fake_rank(rank, self._links) as world:
                found.append(self._place_rank(arrange_ranks(world, estimate.strategy, self._config.machine)))
        memory = estimate.memory
        planned = PlacedBytes(memory.weights, memory.gradients, memory.optimizer)
        most = max(found, key=lambda each: each.total)
        return Placement(estimate.strategy, len(ranks), planned, most, min(each.total for each in found))

    def _list_ranks(self, strategy: ParallelName) -> list[int]:
        """All that hold the first copy of the model; of other copies, the first rank."""
        copies = {"hsdp": self._links.gpus_per_node, "ddp": count_sharing_ranks(self._config.machine)}
        sharing = copies.get(strategy, self._links.gpus)
        return [rank for rank in range(self._links.gpus) if rank < sharing or rank % sharing == 0]

    def _build(self) -> GPT:
        return build_meta_gpt(self._config.model, self._plan.padded_vocab_size)

    def _place_rank(self, world: World) -> PlacedBytes:
        """What this rank holds of the model after it was shared among the ranks."""
        model, layouts = self._whole, {}
        if world.uses_fsdp:
            model = self._build()
            parallelize(model, world, model.list_blocks())
        elif world.strategy == "ddp":
            model = self._build()
            layouts = split_model(model, world)
        local = {name: to_local(parameter) for name, parameter in model.named_parameters()}
        shapes = tuple(tuple(piece.shape) for piece in local.values())
        if shapes not in self._states:
            self._states[shapes] = measure_state(model, self._config, world, layouts)
        owned = set(local)
        if world.strategy == "zero1":
            owners = Ownership(model, world).owners
            owned = {name for name, owner in zip(local, owners, strict=True) if owner == world.rank}
        weights = sum(piece.nbytes for piece in local.values())
        state = sum(size for name, size in self._states[shapes].items() if name in owned)
        average = 0 if self._config.optimizer.ema_decay is None else weights
        return PlacedBytes(weights, weights, state + average)


def measure_state(
    model: nn.Module, config: RunConfig, world: World, layouts: Mapping[str, Layout]
) -> Mapping[str, int]:
    """Bytes of the optimizer's state by parameter, on the meta device."""
    if world.uses_fsdp:
        optimizer: OptimizerContainer = build_fsdp_optimizer(model, config.optimizer, replace(world, device=META))
    else:
        optimizer = build_optimizer(model, config.optimizer, META, layouts=layouts)
    optimizer.init_state()
    sizes: Counter[str] = Counter()
    for name, tensor in optimizer.state_tensors().items():
        sizes[name.rpartition("/")[0]] += to_local(tensor).nbytes
    return sizes


@contextmanager
def open_fake_rank(rank: int, links: Interconnect) -> Iterator[World]:
    """This process as one rank of many that do not exist, on machines of equal size."""
    local_size, excepthook = os.environ.get(LOCAL_SIZE), sys.excepthook
    os.environ[LOCAL_SIZE] = str(links.gpus_per_node)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
    dist.init_process_group("fake", store=store, rank=rank, world_size=links.gpus)
    try:
        yield World(rank, links.gpus, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's names the rank in every traceback
        if local_size is None:
            del os.environ[LOCAL_SIZE]
        else:
            os.environ[LOCAL_SIZE] = local_size
