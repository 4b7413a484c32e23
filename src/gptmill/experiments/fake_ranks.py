"""Simulation: places a model on the ranks of a cluster that is not there, and compares its memory with the plan's.

Every rank is this process once, in torch's "fake" process group, whose collectives send nothing. The model is on the
meta device, which has shapes but no memory, and is sharded by the code that shards a real one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg as fake_pg  # the import registers the backend

from gptmill.config.durations import format_duration
from gptmill.config.errors import UserError
from gptmill.config.run import ParallelName, RunConfig
from gptmill.experiments.child_run import Say
from gptmill.models.gpt import GPT
from gptmill.models.initialisation import SkipInit
from gptmill.runtime.interconnects import Interconnect
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.world import World
from gptmill.training.optimizers import build_optimizer
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
        return max(abs(planned - placed) / max(1, placed) for planned, placed in pairs)

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def simulate(
    config: RunConfig, plan: TrainPlan, links: Interconnect, estimates: Sequence[StrategyEstimate], say: Say
) -> tuple[Placement, ...]:
    """Places the model by each strategy that shards anything, on every rank."""
    if "RANK" in os.environ or dist.is_initialized():
        raise UserError("--simulate makes its own ranks; run it without torchrun")
    if "architecture" in config.model.own_parts:
        raise UserError("--simulate knows where the blocks of the built-in models are, not those of a plug-in's")
    return tuple(
        _place(config, plan, links, estimate, say) for estimate in estimates if estimate.strategy != "ddp"
    )


def _place(
    config: RunConfig, plan: TrainPlan, links: Interconnect, estimate: StrategyEstimate, say: Say
) -> Placement:
    started = said = time.monotonic()
    found: list[PlacedBytes] = []
    states: dict[LocalShapes, dict[str, int]] = {}
    for rank in range(links.gpus):
        with open_fake_rank(rank, links) as world:
            found.append(place_rank(config, plan, arrange_ranks(world, estimate.strategy), states))
        now, done = time.monotonic(), rank + 1
        if now - said > SECONDS_BETWEEN_REPORTS:
            left = (now - started) / done * (links.gpus - done)
            say(f"simulated {done} of {links.gpus} ranks of {estimate.strategy}, {format_duration(left)} left")
            said = now
    memory = estimate.memory
    planned = PlacedBytes(memory.weights, memory.gradients, memory.optimizer)
    most = max(found, key=lambda each: each.total)
    return Placement(estimate.strategy, links.gpus, planned, most, min(each.total for each in found))


@contextmanager
def open_fake_rank(rank: int, links: Interconnect) -> Iterator[World]:
    """This process as one rank of many that do not exist, on machines of equal size."""
    local_size, excepthook = os.environ.get(LOCAL_SIZE), sys.excepthook
    os.environ[LOCAL_SIZE] = str(links.gpus_per_node)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=links.gpus)
    try:
        yield World(rank, links.gpus, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's names the rank in every traceback
        if local_size is None:
            del os.environ[LOCAL_SIZE]
        else:
            os.environ[LOCAL_SIZE] = local_size


def place_rank(
    config: RunConfig, plan: TrainPlan, world: World, states: dict[LocalShapes, dict[str, int]]
) -> PlacedBytes:
    """What this rank holds of the model after it was shared among the ranks.

    `states` keeps the sizes of the optimizer's state for other ranks with pieces of the same shapes.
    """
    with META, SkipInit():
        model = GPT(config.model, plan.padded_vocab_size)
    if world.shards_weights:
        for block in (*model.blocks, *model.extra_blocks):
            fully_shard(block, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
    local = {name: _take_local(parameter) for name, parameter in model.named_parameters()}
    shapes = tuple(tuple(piece.shape) for piece in local.values())
    if shapes not in states:
        states[shapes] = measure_state(model, config)
    owned = set(local)
    if world.strategy == "zero1":
        owners = Ownership(model, world).owners
        owned = {name for name, owner in zip(local, owners, strict=True) if owner == world.rank}
    weights = sum(piece.nbytes for piece in local.values())
    return PlacedBytes(weights, weights, sum(size for name, size in states[shapes].items() if name in owned))


def measure_state(model: nn.Module, config: RunConfig) -> dict[str, int]:
    """Bytes of the optimizer's state by parameter, after a step on the meta device."""
    optimizer = build_optimizer(model, config.optimizer, META)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in names:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        names[parameter]: sum(_take_local(value).nbytes for value in state.values())
        for member in optimizer.members
        for parameter, state in member.state.items()
    }


def _take_local(tensor: Tensor) -> Tensor:
    """This rank's piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
