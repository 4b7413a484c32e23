"""The numbers of a step: added up on the device, read on the host when they have arrived there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.data.batches.batch import Batch
from gptmill.models.gpt import Losses
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.timing import Moment
from gptmill.training.spike_detector import Entry


class Numbers(NamedTuple):
    """What a step tells of itself, once the device has come so far."""

    loss: float
    grad_norm: float
    stop_asked: bool
    """Whether any rank was asked to stop."""
    scale: float
    """What fp16 multiplied the loss with; 1 in the other formats."""
    objective: float
    """What is minimised: the loss, and all that is added to it."""
    by_corpus: tuple[float, ...] = ()
    """The loss on each of several corpora; not a number where a step had nothing of one."""
    expert_loads: tuple[float, ...] = ()
    """Tokens of each expert of each layer, as a share of what an even spread would give it."""

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
    num_corpora: int = 0
    num_experts: int = 0

    def read(self) -> Numbers:
        """Waits for this step, not for later ones."""
        self.arrived.wait()
        norm, scale, stop, loss, objective, *rest = self.numbers.tolist()
        sums, counts = rest[: self.num_corpora], rest[self.num_corpora : 2 * self.num_corpora]
        by_corpus = tuple(total / count if count else math.nan for total, count in zip(sums, counts, strict=True))
        loads = _find_loads(rest[2 * self.num_corpora :], self.num_experts)
        return Numbers(loss, norm, stop > 0, scale, objective, by_corpus, loads)

    def make_entry(self, numbers: Numbers) -> Entry:
        """What the guard judges."""
        return Entry(self.step, numbers.loss, numbers.grad_norm, self.windows, numbers.is_overflow)


class Totals:
    """What the micro-batches of a step add up to, on the device."""

    def __init__(self, device: torch.device, num_corpora: int) -> None:
        self.num_experts = 0
        self._cross_entropy = torch.zeros((), device=device)
        self._objective = torch.zeros((), device=device)
        self._by_corpus = torch.zeros(2, num_corpora, device=device)
        self._experts: Tensor | None = None

    def add(self, losses: Losses, batch: Batch) -> None:
        self._cross_entropy += losses.cross_entropy
        self._objective += losses.objective
        if losses.per_domain_G is not None and batch.groups is not None:
            counts = (batch.targets != IGNORE_INDEX).sum(dim=1, dtype=torch.float32)
            self._by_corpus[0] += losses.per_domain_G
            self._by_corpus[1].index_add_(0, batch.groups, counts)
        if losses.experts_LE is not None:
            self.num_experts = losses.experts_LE.shape[1]
            counts = losses.experts_LE.float().flatten()
            self._experts = counts if self._experts is None else self._experts + counts

    def make_numbers(self, tokens: int) -> Tensor:
        """In a row: the mean loss and objective, the corpora's sums and counts, the experts' tokens."""
        means = torch.stack([self._cross_entropy / tokens, self._objective / tokens])
        experts = [] if self._experts is None else [self._experts]
        return torch.cat([means, self._by_corpus.flatten(), *experts])


def _find_loads(tokens: list[float], num_experts: int) -> tuple[float, ...]:
    """Each expert's tokens beside those of an even spread over its layer."""
    layers = [tokens[first : first + num_experts] for first in range(0, len(tokens), num_experts or 1)]
    return tuple(num_experts * count / (sum(layer) or 1.0) for layer in layers for count in layer)


def send_to_host(numbers: Tensor) -> Tensor:
    """Starts the copy; the host reads it when it has arrived."""
    if numbers.device.type != "cuda":
        return numbers.cpu()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
