"""One optimizer step. Never synchronises with the device: the step's metrics are read later, from StepStats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.config.value_syntax import find_stage
from gptmill.data.batches.batch import Batch, make_batch
from gptmill.data.batches.data_loader import DataLoader
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.host_memory import send_to_host
from gptmill.runtime.seeds import make_step_seed, seed_everything
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.world import CP, World
from gptmill.training.audit import Audit, is_audit_due
from gptmill.training.exact_sum import list_numbers
from gptmill.training.histograms import Histograms, count_gradients, count_weights, send_histograms, share_counts
from gptmill.training.optimizers import PER_PARAMETER
from gptmill.training.plan import TrainPlan
from gptmill.training.schedules import make_lr
from gptmill.training.skip_ranges import find_unskipped
from gptmill.training.sparse_update import keep_zeros
from gptmill.training.state import TrainState
from gptmill.training.step_stats import StepStats, make_totals


def ignore(_phase: str) -> None:
    """The heartbeat of a step without a watchdog."""


def train_step(
    state: TrainState,
    loader: DataLoader,
    config: RunConfig,
    plan: TrainPlan,
    world: World,
    stop: StopFlag,
    beat: Callable[[str], None] = ignore,
) -> StepStats:
    """Accumulates gradients over the micro-batches, clips them and updates the weights; `beat` is called per phase."""
    started, waited_before = DeviceTimestamp(world.device), loader.waited_seconds
    lr = make_lr(state.step, config.optimizer, plan.max_steps)
    state.optimizer.set_lr(lr, config.optimizer.max_lr)
    num_windows = plan.count_windows(state.step + 1)
    first = find_unskipped(state.skipped_windows, state.windows_read, num_windows)
    windows = first, first + num_windows
    # No all-reduce needed: which tokens all ranks read follows from the same data position.
    tokens = loader.sampler.count_targets(first, num_windows)
    audit = Audit(state, loader, config, plan, world, first) if is_audit_due(config, state.step + 1) else None
    count, is_exact = plan.count_micro_batches(state.step + 1), state.reduction.is_exact
    numbers = list_numbers(count, world.data_rank, world.data_size, is_exact=is_exact)
    batches = _read_batches(loader, numbers, plan, state.step + 1, stop, beat)
    num_experts = _accumulate(state, batches, numbers, config, plan, world, tokens)
    if audit is not None:
        audit.compare()
    reduced = state.reduction.reduce_totals(bool(stop), tokens, world)
    state.reduction.reduce_gradients()
    is_due = is_histogram_due(config.tracking.histogram_freq, state.step + 1)
    takes_histograms = is_due and (world.is_main or world.shards_weights or state.optimizer.is_sharded)
    state.is_updating = True
    norm_and_scale, histograms = _update(state, config, world, reduced[1:3], takes_histograms=takes_histograms)
    state.step += 1
    state.windows_jumped += first - state.windows_read
    state.windows_read = windows[1]
    state.is_updating = False
    values = send_to_host(torch.cat([norm_and_scale, reduced]))
    return StepStats(
        state.step,
        epoch=state.windows_read / plan.windows_per_epoch,
        tokens=tokens,
        lr=lr,
        values=values,
        started=started,
        arrived=DeviceTimestamp(world.device),
        data_wait_seconds=loader.waited_seconds - waited_before,
        windows=windows,
        num_corpora=len(plan.corpora),
        num_experts=num_experts,
        histograms=histograms,
    )


def _read_batches(
    loader: DataLoader, numbers: range, plan: TrainPlan, step: int, stop: StopFlag, beat: Callable[[str], None]
) -> Iterator[tuple[int, Batch]]:
    """The micro-batches of a step that this rank computes, each with its global number."""
    width = find_stage(plan.context_warmup, step)
    for number in numbers:
        beat("waiting for data")
        batch = make_batch(loader.next_batch(lambda: bool(stop)), IGNORE_INDEX, plan.separator, width)
        beat("computing")
        yield number, batch


def _accumulate(
    state: TrainState,
    batches: Iterator[tuple[int, Batch]],
    numbers: range,
    config: RunConfig,
    plan: TrainPlan,
    world: World,
    tokens: int,
) -> int:
    """Runs this rank's micro-batches, whose gradients and losses go to the reduction; returns the number of experts."""
    seed, reduction, num_experts = config.training.seed, state.reduction, 0
    # DDP and FSDP average gradients over ranks, while the loss is divided by the tokens of all ranks.
    scale = (world.gradient_size if reduction.is_averaged else 1) / tokens
    # Runs from before the option drew the random numbers of a step one after the other.
    seeds_each = config.machine.exact_ranks is not None and draws_random_numbers(config)
    if not seeds_each:
        seed_everything(make_step_seed(seed, state.step, world.gradient_rank), world.device)
    rows, row = world.axis_size(CP), world.axis_rank(CP)  # ranks that share windows draw for different tokens
    state.micro_batch_runner.begin_step()
    reduction.begin_step()
    for number, batch in batches:
        if seeds_each:
            seed_everything(make_step_seed(seed, state.step, number * rows + row), world.device)
        with state.no_sync(is_last=number == numbers[-1]), reduction.micro_batch(number):
            losses = state.micro_batch_runner.run(batch, scale)
        num_experts = 0 if losses.experts_LE is None else losses.experts_LE.shape[1]
        reduction.add_totals(number, make_totals(losses, batch, len(plan.corpora)))
    if seeds_each:  # for the update, which is the same on all ranks
        seed_everything(make_step_seed(seed, state.step, world.data_size * len(numbers) * rows), world.device)
    return num_experts


def draws_random_numbers(config: RunConfig) -> bool:
    """Whether a step may draw any: for dropout, or in a part of a plug-in."""
    has_own_optimizer = config.optimizer.optimizer.tag not in PER_PARAMETER
    return config.model.dropout > 0 or bool(config.model.own_parts) or has_own_optimizer


def is_histogram_due(histogram_freq: int | None, step: int) -> bool:
    return histogram_freq is not None and step % histogram_freq == 0


def _update(
    state: TrainState, config: RunConfig, world: World, losses: Tensor, *, takes_histograms: bool
) -> tuple[Tensor, Histograms | None]:
    """Clips, applies and clears the gradients; returns their norm before clipping with the loss scale, and histograms.

    By now all ranks hold the same losses and agree on the norm, so that they skip the same updates.
    """
    optimizer, scale = state.optimizer, state.scaler.scale(torch.ones((), device=losses.device))
    optimizer.unscale(state.scaler)
    gradients = count_gradients(state.model) if takes_histograms else {}
    if takes_histograms and optimizer.is_sharded:
        gradients = share_counts(gradients, state.model, world)
    with keep_zeros(state.model) if config.training.keep_zeros else nullcontext():
        norm = optimizer.clip_gradients(config.optimizer.grad_clip or None)
        found_inf = ~(losses.isfinite().all() & norm.isfinite())
        if config.guard.guard == "off" and not state.scaler.is_enabled():
            optimizer.step()
        else:
            # Takes the place of scaler.step(), which checks the gradients but not the loss.
            optimizer.step_unless(found_inf)
    optimizer.share_weights()
    if state.ema is not None:
        state.ema.update(state.model, found_inf)
    state.scaler.update()
    optimizer.zero_grad()
    histograms = send_histograms(count_weights(state.model), gradients, world) if takes_histograms else None
    return torch.stack([norm, scale]), histograms
