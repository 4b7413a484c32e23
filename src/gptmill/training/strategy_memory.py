"""Memory of one GPU when several share a model: by strategy, from the shapes of the parameters alone.

FSDP2 splits every parameter along its first dimension and pads the last piece, so the largest piece counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from gptmill.config.run import ParallelName, RunConfig
from gptmill.models.built_shapes import list_shapes
from gptmill.training.memory_estimate import EMA_BYTES, FP32, HALF, HALF_PRECISIONS
from gptmill.training.optimizers.ownership import assign_owners
from gptmill.training.optimizers.param_groups import BLOCK_PREFIXES
from gptmill.training.plan import TrainPlan
from gptmill.training.run_counts import MOMENTUM_BYTES, STATE_BYTES, USUAL_STATE_BYTES

Shape = tuple[int, ...]
GATHERED_BLOCKS = 2  # the one that computes, and the next, which is gathered meanwhile


@dataclass(frozen=True)
class StrategyMemory:
    """Bytes of one GPU by purpose, at the peak of a step."""

    weights: int
    """In fp32, as the optimizer updates them."""
    copies: int
    """Of weights that compute: casts to half precision, and blocks gathered from all ranks."""
    gradients: int
    """In fp32, from one micro-batch to the next."""
    buffers: int
    """What is being sent."""
    optimizer: int
    """Its state, and the moving average of the weights."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class ShardedUnits:
    """The parameters of a model as they are gathered: block by block, and the rest (root) at once."""

    shapes: Mapping[str, Shape]

    @property
    def total(self) -> int:
        return count_numbers(self.shapes.values())

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Parameters of each block by name; all of a model without blocks is root."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            if (unit := find_unit(name)) is not None:
                sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
        return sizes

    @property
    def block(self) -> int:
        """Parameters of the largest block."""
        return max(self.blocks.values(), default=0)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def root(self) -> int:
        return self.total - sum(self.blocks.values())

    def count_shard(self, ranks: int) -> int:
        """Parameters of the rank that holds most."""
        return count_numbers(split_shape(shape, ranks) for shape in self.shapes.values())

    def assign(self, ranks: int) -> list[int]:
        """The owner of each parameter, where ranks own whole ones."""
        return assign_owners([math.prod(shape) for shape in self.shapes.values()], ranks)

    def count_owned(self, ranks: int) -> int:
        """Parameters of the rank that owns most."""
        loads = [0] * ranks
        for shape, owner in zip(self.shapes.values(), self.assign(ranks), strict=True):
            loads[owner] += math.prod(shape)
        return max(loads)


def build_units(config: RunConfig, plan: TrainPlan) -> ShardedUnits:
    """The parameters of the run's model, which is built without memory."""
    return ShardedUnits(list_shapes(config.model, plan.padded_vocab_size))


def find_unit(name: str) -> str | None:
    """The block that a parameter is gathered with; None for one of the root."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in BLOCK_PREFIXES else None


def split_shape(shape: Shape, ranks: int) -> Shape:
    """The shape of the first rank's piece, the largest."""
    return (math.ceil(shape[0] / ranks), *shape[1:]) if shape else shape


def count_numbers(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def estimate_strategy_memory(
    strategy: ParallelName,
    config: RunConfig,
    plan: TrainPlan,
    units: ShardedUnits,
    shards: int,
    *,
    holds_gradients: bool = False,
) -> StrategyMemory:
    """Bytes by purpose where `shards` ranks share what the strategy shards.

    `holds_gradients`: sharded ranks keep whole gradients over the micro-batches of a step, and sum them once.
    """
    assert plan.memory is not None
    number = HALF if plan.precision in HALF_PRECISIONS else FP32
    is_sharded = strategy in ("fsdp", "hsdp")
    held = units.count_shard(shards) if is_sharded else units.total
    if is_sharded:
        copies = number * (units.root + GATHERED_BLOCKS * units.block)
        # Gradients of the root wait for the end of the backward pass; a block's are summed while the next one's appear.
        buffers = number * (units.root + units.block) + FP32 * (units.total if holds_gradients else units.block)
    else:
        copies = units.total * HALF if number == HALF else 0
        buffers = FP32 * (units.total if strategy == "ddp" else units.count_owned(shards))  # DDP's buckets
    if strategy == "zero1":
        state = count_owned_state(config, units, shards)
    else:
        state = count_state(config, units, shards if is_sharded else 1)
    return StrategyMemory(
        weights=FP32 * held,
        copies=copies,
        gradients=FP32 * held,
        buffers=buffers,
        optimizer=round(state) + (EMA_BYTES * held if config.optimizer.ema_decay is not None else 0),
        activations=plan.memory.activations,
        logits=plan.memory.logits,
    )


def count_state(config: RunConfig, units: ShardedUnits, ranks: int) -> float:
    """Bytes of optimizer state where every parameter is split."""
    return sum(
        math.prod(split_shape(shape, ranks)) * find_state_bytes(config, name, shape)
        for name, shape in units.shapes.items()
    )


def count_owned_state(config: RunConfig, units: ShardedUnits, ranks: int) -> float:
    """Bytes of optimizer state of the rank that has most, where each rank has some parameters whole."""
    loads = [0.0] * ranks
    for (name, shape), owner in zip(units.shapes.items(), units.assign(ranks), strict=True):
        loads[owner] += math.prod(shape) * find_state_bytes(config, name, shape)
    return max(loads)


def find_state_bytes(config: RunConfig, name: str, shape: Shape) -> float:
    """Optimizer state per number of a parameter; Muon keeps one momentum of what `param_groups.uses_muon` gives it."""
    tag = config.optimizer.optimizer.tag
    is_matrix = len(shape) >= 2 and find_unit(name) is not None and not name.endswith("router.weight")
    return MOMENTUM_BYTES if tag == "muon" and is_matrix else STATE_BYTES.get(tag, USUAL_STATE_BYTES)
