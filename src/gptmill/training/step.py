"""One optimizer step. Nothing here waits for the device; the numbers of a step are read later, from StepStats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.config.stages import find_stage_length
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.feed import Feed
from gptmill.models.gpt import IGNORED_TARGET
from gptmill.runtime.precision import make_autocast
from gptmill.runtime.seeds import make_step_seed, seed_everything
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.timing import Moment
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.schedules import make_lr
from gptmill.training.state import TrainState


@dataclass(frozen=True)
class StepStats:
    """A step's numbers, on their way from the device. All ranks read the same ones."""

    step: int
    epoch: float
    tokens: int
    lr: float
    numbers: Tensor
    started: Moment
    arrived: Moment
    data_wait_seconds: float = 0.0

    def read(self) -> tuple[float, float, bool]:
        """(loss, gradient norm, whether any rank was asked to stop). Waits for this step, not for later ones."""
        self.arrived.wait()
        loss, stop, norm = self.numbers.tolist()
        return loss, norm, stop > 0


def train_step(
    state: TrainState, feed: Feed, config: RunConfig, plan: TrainPlan, world: World, stop: StopFlag
) -> StepStats:
    """Forward and backward over all micro-batches, clip, update."""
    started, waited_before = Moment(world.device), feed.waited_seconds
    training = config.training
    seed_everything(make_step_seed(training.seed, state.step, world.rank))
    lr = make_lr(state.step, config.optimizer, plan.max_steps)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    # Known without asking the other ranks, since what they read is a function of the same numbers.
    tokens = feed.stream.count_targets(state.windows_read, plan.windows_per_step)
    # DDP averages gradients over ranks, while the loss is divided by the tokens of all of them.
    scale = world.size / tokens
    width = find_stage_length(plan.context_stages, state.step + 1)
    total = torch.zeros((), device=world.device)
    for micro_batch in range(plan.micro_batches):
        batch = make_batch(feed.take(lambda: bool(stop)), IGNORED_TARGET, plan.separator, width)
        with state.hold_back_sync(is_last=micro_batch == plan.micro_batches - 1):
            with make_autocast(plan.precision, world.device):
                loss = state.forward(batch.tokens, batch.targets, training.label_smoothing, batch.documents)
            state.scaler.scale(loss * scale).backward()
        total += loss.detach()
    norm = _update(state, config.optimizer.grad_clip)
    state.step += 1
    state.windows_read += plan.windows_per_step
    numbers = _send_numbers(total / tokens, norm, world, stop)
    epoch, waited = state.windows_read / plan.windows_per_epoch, feed.waited_seconds - waited_before
    return StepStats(state.step, epoch, tokens, lr, numbers, started, Moment(world.device), waited)


def _update(state: TrainState, grad_clip: float | None) -> Tensor:
    """Clips, applies and clears the gradients; returns their norm from before clipping."""
    state.scaler.unscale_(state.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), grad_clip or math.inf)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return norm


def _send_numbers(loss: Tensor, norm: Tensor, world: World, stop: StopFlag) -> Tensor:
    """Starts the copy to the host. The wish to stop travels with the loss, so that agreeing on it costs nothing."""
    wish = torch.full((), float(bool(stop)), device=world.device)
    numbers = torch.cat([world.sum_over_ranks(torch.stack([loss, wish])), norm.view(1)])
    if world.device.type != "cuda":
        return numbers.cpu()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
