"""One optimizer step. Nothing here waits for the device; the numbers of a step are read later, from StepStats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.config.stages import find_stage
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.feed import Feed
from gptmill.models.gpt import IGNORED_TARGET
from gptmill.runtime.precision import make_autocast
from gptmill.runtime.seeds import make_step_seed, seed_everything
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.timing import Moment
from gptmill.runtime.world import World
from gptmill.training.guard import Entry
from gptmill.training.optimizers import step_unless
from gptmill.training.plan import TrainPlan
from gptmill.training.schedules import make_lr
from gptmill.training.skipping import skip_over
from gptmill.training.state import TrainState


class Numbers(NamedTuple):
    """What a step tells of itself, once the device has come so far."""

    loss: float
    grad_norm: float
    stop_asked: bool
    """Whether any rank was asked to stop."""
    scale: float
    """What fp16 multiplied the loss with; 1 in the other formats."""

    @property
    def is_finite(self) -> bool:
        """Whether the update could be done. It was not where this is false and the guard is on."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_overflow(self) -> bool:
        """Whether fp16's scale was too high, which it finds out by trying: no sign that anything is wrong."""
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm) and self.scale > 1


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
    windows: tuple[int, int] = (0, 0)
    """The first window of the step's data, and the one after its last."""

    def read(self) -> Numbers:
        """Waits for this step, not for later ones."""
        self.arrived.wait()
        loss, stop, norm, scale = self.numbers.tolist()
        return Numbers(loss, norm, stop > 0, scale)

    def make_entry(self, numbers: Numbers) -> Entry:
        """What the guard judges."""
        return Entry(self.step, numbers.loss, numbers.grad_norm, self.windows, numbers.is_overflow)


def ignore(_phase: str) -> None:
    """The beat of a step that nobody watches."""


def train_step(
    state: TrainState,
    feed: Feed,
    config: RunConfig,
    plan: TrainPlan,
    world: World,
    stop: StopFlag,
    beat: Callable[[str], None] = ignore,
) -> StepStats:
    """Forward and backward over all micro-batches, clip, update. `beat` is told what the step is about to do."""
    started, waited_before = Moment(world.device), feed.waited_seconds
    training = config.training
    seed_everything(make_step_seed(training.seed, state.step, world.rank))
    lr = make_lr(state.step, config.optimizer, plan.max_steps)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    first = skip_over(state.skipped_windows, state.windows_read, plan.windows_per_step)
    windows = first, first + plan.windows_per_step
    # Known without asking the other ranks, since what they read is a function of the same numbers.
    tokens = feed.stream.count_targets(first, plan.windows_per_step)
    # DDP averages gradients over ranks, while the loss is divided by the tokens of all of them.
    scale = world.size / tokens
    width = find_stage(plan.context_stages, state.step + 1)
    total = torch.zeros((), device=world.device)
    for micro_batch in range(plan.micro_batches):
        beat("waiting for data")
        batch = make_batch(feed.take(lambda: bool(stop)), IGNORED_TARGET, plan.separator, width)
        beat("computing")
        with state.hold_back_sync(is_last=micro_batch == plan.micro_batches - 1):
            with make_autocast(plan.precision, world.device):
                loss = state.forward(batch.tokens, batch.targets, training.label_smoothing, batch.documents)
            state.scaler.scale(loss * scale).backward()
        total += loss.detach()
    # The wish to stop travels with the loss, so that agreeing on it costs nothing.
    wish = torch.full((), float(bool(stop)), device=world.device)
    agreed = world.sum_over_ranks(torch.stack([total / tokens, wish]))
    norm_and_scale = _update(state, config, agreed[0])
    state.step += 1
    state.windows_jumped += first - state.windows_read
    state.windows_read = windows[1]
    numbers = _send_to_host(torch.cat([agreed, norm_and_scale]))
    epoch, waited = state.windows_read / plan.windows_per_epoch, feed.waited_seconds - waited_before
    return StepStats(state.step, epoch, tokens, lr, numbers, started, Moment(world.device), waited, windows)


def _update(state: TrainState, config: RunConfig, loss: Tensor) -> Tensor:
    """Clips, applies and clears the gradients; returns their norm from before clipping, and their scale.

    All ranks have the same loss and the same gradients by now, so that they leave out the same updates.
    """
    scale = state.scaler.scale(torch.ones((), device=loss.device))
    state.scaler.unscale_(state.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.optimizer.grad_clip or math.inf)
    if config.guard.guard == "off" and not state.scaler.is_enabled():
        state.optimizer.step()
    else:
        # In fp16 this is scaler.step(), which looks at the gradients alone.
        step_unless(state.optimizer, ~(loss.isfinite() & norm.isfinite()))
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.stack([norm, scale])


def _send_to_host(numbers: Tensor) -> Tensor:
    """Starts the copy; the host reads it when it has arrived."""
    if numbers.device.type != "cuda":
        return numbers.cpu()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
