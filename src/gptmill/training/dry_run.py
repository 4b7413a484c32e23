"""Dry run: one micro-batch of the largest shape before the first step, to find out-of-memory errors early.

Nothing has been written to the run's directory yet, and the state does not change.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.batch import Batch
from gptmill.runtime.host_usage import measure_growth
from gptmill.runtime.memory import is_out_of_memory
from gptmill.runtime.world import World
from gptmill.training.gemm_autotuning import autotune_run_gemms
from gptmill.training.host_memory_check import check_activations_fit
from gptmill.training.micro_batch import EagerPass, GraphedPass
from gptmill.training.plan import TrainPlan
from gptmill.training.state import TrainState


@contextmanager
def refuse_too_large(device: torch.device) -> Iterator[None]:
    """Raises UserError if the weights or the optimizer state are refused memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory on {device}: the model and its optimizer do not fit; free memory on the device, or "
            f"use a smaller model"
        ) from None


def dry_run(state: TrainState, config: RunConfig, plan: TrainPlan, world: World, host_room: int | None = None) -> None:
    """Raises UserError if a micro-batch does not fit, naming settings that fit.

    `host_room` is the host memory that was available before the state was built; None if unknown.
    """
    rows, runner = config.training.mini_batch_size, state.micro_batch_runner
    # Without DDP: a rank that runs out of memory would leave the others waiting in the all-reduce.
    local = replace(runner if isinstance(runner, EagerPass) else runner.eager, forward=state.model)
    with world.together():
        check_activations_fit(
            config, plan, world, host_room,
            lambda: measure_growth(lambda: _try_rows(state, config, plan, world, 1, local)),
        )  # fmt: skip
    with autotune_run_gemms(world):
        norm = _try_rows(state, config, plan, world, rows, local if isinstance(runner, EagerPass) else runner)
    if norm is None and world.shares_forward:
        # The others may be waiting for this rank in the middle of a pass: it cannot ask them, nor try anything else.
        raise UserError(
            f"out of memory on {world.device}: one micro-batch of mini_batch_size {rows} x context_length "
            f"{config.model.context_length} does not fit beside rank {world.rank}'s part of the model; use a smaller "
            f"--mini_batch_size, --gradient_checkpointing full, or more ranks"
        )
    if world.any_rank(norm is None):
        if norm is not None:
            raise UserError("stopped, because another rank ran out of memory")
        advice = _find_advice(state, config, plan, world, local)
        raise UserError(
            f"out of memory on {world.device}: one micro-batch of mini_batch_size {rows} x context_length "
            f"{config.model.context_length} does not fit{_describe_estimate(plan)}; {advice}"
        )
    # Non-finite gradients of a trained model are for the spike detector; fp16 may still be searching its loss scale.
    is_fresh = state.step == 0 and not state.scaler.is_enabled()
    if is_fresh and world.any_rank(norm is None or not math.isfinite(norm)):
        raise UserError(
            f"the gradients of a fresh model on random tokens are not finite on {world.device}: a kernel is broken; "
            f"try --no_compile, another --precision, or an empty compile cache (TORCHINDUCTOR_CACHE_DIR)"
        )


def _describe_estimate(plan: TrainPlan) -> str:
    return "" if plan.memory is None else f" (by estimate, training needs {plan.memory.total / 1e9:,.1f} GB)"


def _find_advice(state: TrainState, config: RunConfig, plan: TrainPlan, world: World, local: EagerPass) -> str:
    """Settings with which a micro-batch fits, found by trying."""
    rows, own = config.training.mini_batch_size, config.machine.gradient_checkpointing
    for recompute in dict.fromkeys((own, "full")):
        state.model.set_activation_checkpointing(recompute)
        smaller = rows // 2 if recompute == own else rows
        while smaller:
            if rows % smaller == 0 and _try_rows(state, config, plan, world, smaller, local) is not None:
                flags = [f"--mini_batch_size {smaller}"] if smaller < rows else []
                flags += [f"--gradient_checkpointing {recompute}"] if recompute != own else []
                return f"{' '.join(flags)} does (total_batch_size stays as it is)"
            smaller //= 2
    return "not even a single window does; use a shorter --context_length or a smaller model"


def _try_rows(
    state: TrainState, config: RunConfig, plan: TrainPlan, world: World, rows: int, runner: EagerPass | GraphedPass
) -> float | None:
    """The gradient norm of a micro-batch of `rows` windows; None if it does not fit."""
    norm: float | None = None
    try:
        norm = _run_micro_batch(state, config, plan, world, rows, runner)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the except block, where the traceback would keep the activations alive.
    state.optimizer.zero_grad()
    if norm is None:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return norm


def _run_micro_batch(
    state: TrainState, config: RunConfig, plan: TrainPlan, world: World, rows: int, runner: EagerPass | GraphedPass
) -> float:
    """Forward, backward and a skipped update; returns the gradient norm."""
    shape, device = (rows, config.model.context_length), world.device
    generator = torch.Generator().manual_seed(config.training.seed)
    # Two tensors: passing one twice would make the compiled model specialise on that, and recompile at the first step.
    tokens, targets = (torch.randint(plan.vocab_size, shape, generator=generator).to(device) for _ in range(2))
    documents = None if plan.separator is None else torch.zeros(shape, dtype=torch.int64, device=device)
    domains = torch.zeros(rows, dtype=torch.int64, device=device) if plan.corpora else None
    runner.dry_run(Batch(tokens, targets, documents, domains))
    state.optimizer.step_unless(torch.ones((), dtype=torch.bool, device=device))
    return float(state.optimizer.clip_gradients(None))
