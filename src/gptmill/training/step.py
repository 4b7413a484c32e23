"""One optimizer step. Never synchronises with the device: the step's metrics are read later, from StepStats."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.config.value_syntax import find_stage
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.data_loader import DataLoader
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.host_memory import send_to_host
from gptmill.runtime.seeds import make_step_seed, seed_everything
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.world import World
from gptmill.training.histograms import Histograms, count_gradients, count_weights, send_histograms
from gptmill.training.plan import TrainPlan
from gptmill.training.schedules import make_lr
from gptmill.training.skip_ranges import find_unskipped
from gptmill.training.sparse_update import keep_zeros
from gptmill.training.state import TrainState
from gptmill.training.step_stats import StepStats, Totals


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
    training = config.training
    seed_everything(make_step_seed(training.seed, state.step, world.gradient_rank), world.device)
    lr = make_lr(state.step, config.optimizer, plan.max_steps)
    state.optimizer.set_lr(lr, config.optimizer.max_lr)
    num_windows, micro_batches = plan.count_windows(state.step + 1), plan.count_micro_batches(state.step + 1)
    first = find_unskipped(state.skipped_windows, state.windows_read, num_windows)
    windows = first, first + num_windows
    # No all-reduce needed: which tokens all ranks read follows from the same data position.
    tokens = loader.sampler.count_targets(first, num_windows)
    # DDP averages gradients over ranks, while the loss is divided by the tokens of all ranks.
    scale = world.gradient_size / tokens
    width = find_stage(plan.context_warmup, state.step + 1)
    totals = Totals(world.device, len(plan.corpora))
    state.micro_batch_runner.begin_step()
    for micro_batch in range(micro_batches):
        beat("waiting for data")
        batch = make_batch(loader.next_batch(lambda: bool(stop)), IGNORE_INDEX, plan.separator, width)
        beat("computing")
        with state.no_sync(is_last=micro_batch == micro_batches - 1):
            losses = state.micro_batch_runner.run(batch, scale)
        totals.add(losses, batch)
    # The stop flag shares the all-reduce of the losses, so that agreeing on it costs nothing.
    stop_flag = torch.full((1,), float(bool(stop)), device=world.device)
    reduced = world.sum_over_data(torch.cat([stop_flag, totals.make_tensor(tokens)]))
    is_due = is_histogram_due(config.tracking.histogram_freq, state.step + 1)
    takes_histograms = is_due and (world.is_main or world.shards_weights)
    norm_and_scale, histograms = _update(state, config, world, reduced[1:3], takes_histograms=takes_histograms)
    state.step += 1
    state.windows_jumped += first - state.windows_read
    state.windows_read = windows[1]
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
        num_experts=totals.num_experts,
        histograms=histograms,
    )


def is_histogram_due(histogram_freq: int | None, step: int) -> bool:
    return histogram_freq is not None and step % histogram_freq == 0


def _update(
    state: TrainState, config: RunConfig, world: World, losses: Tensor, *, takes_histograms: bool
) -> tuple[Tensor, Histograms | None]:
    """Clips, applies and clears the gradients; returns their norm before clipping with the loss scale, and histograms.

    By now all ranks hold the same losses and agree on the norm, so that they skip the same updates.
    """
    scale = state.scaler.scale(torch.ones((), device=losses.device))
    state.optimizer.unscale(state.scaler)
    gradients = count_gradients(state.model) if takes_histograms else {}
    with keep_zeros(state.model) if config.training.keep_zeros else nullcontext():
        norm = state.optimizer.clip_gradients(config.optimizer.grad_clip or None)
        found_inf = ~(losses.isfinite().all() & norm.isfinite())
        if config.guard.guard == "off" and not state.scaler.is_enabled():
            state.optimizer.step()
        else:
            # Takes the place of scaler.step(), which checks the gradients but not the loss.
            state.optimizer.step_unless(found_inf)
    if state.ema is not None:
        state.ema.update(state.model, found_inf)
    state.scaler.update()
    state.optimizer.zero_grad()
    histograms = send_histograms(count_weights(state.model), gradients, world) if takes_histograms else None
    return torch.stack([norm, scale]), histograms
