"""Refuses a run that does not fit into the host's memory: there the system kills a process instead of an allocation.

What a run holds is known from its config. What a micro-batch takes is estimated; of a plug-in's model, which the
estimate does not know, a single window is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gptmill.config.errors import UserError
from gptmill.config.run import ActivationCheckpointing, RunConfig
from gptmill.models.parameters import count_parameters
from gptmill.runtime.parallel.mesh import SHARD, read_local_size
from gptmill.runtime.world import World
from gptmill.training.memory_estimate import FP32, MemoryEstimate, estimate_run_memory
from gptmill.training.plan import TrainPlan
from gptmill.training.run_counts import WEIGHT_BYTES, count_run
from gptmill.training.state import uses_meta_device

GIGA = 1e9
USABLE_SHARE = 0.95
LOADED_BYTES = 300_000_000  # of each rank: libraries that torch loads in its first step, evaluation, data loader
# Where memory is short, glibc maps larger blocks one by one. Others are in arenas with gaps between them, and a freed
# block of logits is too small for the next one, which is aligned; measured on 1 M to 55 M parameters.
MAPPED_BYTES = 32 << 20
GAPS, LOGITS_GAPS = 1.4, 2.0
AMPLE_SHARE = 0.5


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of all ranks on this machine, at the peak of a step."""

    state: int
    """Weights, gradients, optimizer state, and the libraries that use them."""
    copies: int
    """Of weights and optimizer state, for checkpoints and rollbacks."""
    activations: int
    """Of one micro-batch, its logits included."""

    @property
    def total(self) -> int:
        return self.state + self.copies + self.activations


def check_state_fits(config: RunConfig, plan: TrainPlan, world: World, room: int | None) -> None:
    """Raises UserError, before the model is built, if the host has no room for what the run holds all the time.

    `room` is what was available before; None if unknown.
    """
    if room is None:
        return
    needed, what = _count_built(config, plan, world), "building it"
    advice = "free memory on this machine, or use a smaller model"
    if world.device.type == "cpu" and not world.shares_forward:
        needs = count_host_needs(config, plan, world)
        needed = needs.state + needs.copies
        what = f"weights, gradients and optimizer state ({_format(needs.state)}) and {_describe_copies(config, needs)}"
        if config.guard.guard == "rollback" and needed - needs.copies // 2 <= USABLE_SHARE * room:
            advice = "use --guard warn, which keeps one copy, or a smaller model"
    if needed > USABLE_SHARE * room:
        raise UserError(
            f"out of memory on {world.device}: the model and its optimizer do not fit: {what} of {plan.parameters:,} "
            f"parameters takes {_format(needed)} of host memory, but {_format(room)} are available; {advice}"
        )


def has_ample_memory(config: RunConfig, plan: TrainPlan, world: World, room: int | None) -> bool:
    """Whether a run on a CPU needs so little of the host's memory that gaps between large blocks do no harm."""
    if room is None or world.device.type != "cpu" or world.shares_forward or config.model.own_parts:
        return False
    return count_host_needs(config, plan, world, maps_large_blocks=False).total <= AMPLE_SHARE * room


def check_activations_fit(
    config: RunConfig, plan: TrainPlan, world: World, room: int | None, measure_window: Callable[[], int | None]
) -> None:
    """Raises UserError if a micro-batch does not fit beside the rest, with settings that would.

    `measure_window` runs a single window, and returns the bytes that it takes with the gradients; None if unknown.
    """
    if room is None or world.device.type != "cpu" or world.shares_forward:
        return
    needs, usable = count_host_needs(config, plan, world), int(USABLE_SHARE * room)
    scale, basis = 1.0, "by estimate"
    if config.model.own_parts:
        scale, basis = _measure_scale(config, plan, world, measure_window), "by the measure of one window"
        needs = replace(needs, activations=int(scale * needs.activations))
    if needs.total <= usable:
        return
    rows, length = config.training.mini_batch_size, config.model.context_length
    raise UserError(
        f"out of memory on {world.device}: one micro-batch of mini_batch_size {rows} x context_length {length} does "
        f"not fit: its activations take {_format(needs.activations)} ({basis}), weights, gradients and optimizer "
        f"state {_format(needs.state)} and {_describe_copies(config, needs)}, but {_format(room)} are available; "
        f"{_find_fitting(config, plan, world, usable, scale)}"
    )


def _measure_scale(config: RunConfig, plan: TrainPlan, world: World, measure_window: Callable[[], int | None]) -> float:
    """How many times the estimate a window really takes; 0 where it cannot be measured.

    Another shape would compile again, and a chunk of the loss does not grow with the micro-batch.
    """
    if config.machine.compile or config.machine.loss_chunk is not None:
        return 0.0
    growth, gradients = measure_window() or 0, plan.parameters * WEIGHT_BYTES
    estimate = count_host_needs(config, plan, world, rows=1).activations
    return max(0, growth - gradients) * read_local_size(world.size) / estimate


def count_host_needs(
    config: RunConfig,
    plan: TrainPlan,
    world: World,
    *,
    rows: int | None = None,
    recompute: ActivationCheckpointing | None = None,
    maps_large_blocks: bool = True,
) -> HostNeeds:
    """What the ranks of this machine need, with another micro-batch size or activation checkpointing if given."""
    if recompute is not None:
        config = replace(config, machine=replace(config.machine, gradient_checkpointing=recompute))
    whole = config.training.mini_batch_size
    rows = rows or whole
    memory = estimate_run_memory(
        config, plan.padded_vocab_size, rows, plan.precision, has_kernels=False,
        micro_batches=plan.micro_batches * whole // rows,
    )  # fmt: skip
    ranks = read_local_size(world.size)
    residual_bytes = rows * config.model.context_length * config.model.embd_size * FP32
    gaps = 1.0 if maps_large_blocks and residual_bytes >= MAPPED_BYTES else GAPS
    logits_gaps = 1.0 if maps_large_blocks else LOGITS_GAPS
    counts = count_run(config, plan, count_parameters(config.model, plan.padded_vocab_size))
    return HostNeeds(
        state=ranks * (LOADED_BYTES + _count_state(memory, world)),
        copies=counts.snapshot_bytes,
        activations=ranks * int(gaps * memory.activations + logits_gaps * memory.logits),
    )


def _count_state(memory: MemoryEstimate, world: World) -> int:
    optimizer = memory.optimizer // (world.size if world.strategy == "zero1" else 1)
    return memory.weights + memory.gradients + optimizer


def _count_built(config: RunConfig, plan: TrainPlan, world: World) -> int:
    """The weights as they are initialised, in host memory; on a CPU their gradients need as much again."""
    held = plan.parameters // (world.axis_size(SHARD) if uses_meta_device(config, world) else 1)
    return held * WEIGHT_BYTES * (2 if world.device.type == "cpu" else 1)


def _find_fitting(config: RunConfig, plan: TrainPlan, world: World, usable: int, scale: float) -> str:
    """The flags with which the run would fit: smaller micro-batches, or activations that are computed again."""
    rows, own = config.training.mini_batch_size, config.machine.gradient_checkpointing
    for recompute in dict.fromkeys((own, "full")):
        for size in range(rows, 0, -1):
            if rows % size:
                continue
            needs = count_host_needs(config, plan, world, rows=size, recompute=recompute)
            if needs.state + needs.copies + scale * needs.activations <= usable:
                flags = [f"--mini_batch_size {size}"] if size < rows else []
                flags += [f"--gradient_checkpointing {recompute}"] if recompute != own else []
                return f"{' '.join(flags)} would fit (total_batch_size stays as it is)"
    return "not even a single window would fit; use a shorter --context_length or a smaller model"


def _describe_copies(config: RunConfig, needs: HostNeeds) -> str:
    if config.guard.guard == "rollback":
        return f"two copies for checkpoints and rollbacks ({_format(needs.copies)})"
    return f"a copy for checkpoints ({_format(needs.copies)})"


def _format(size: float) -> str:
    return f"{size / GIGA:,.1f} GB"
