"""Metrics of one step: accumulated on the device, copied to the host asynchronously, read there later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.data.batches.batch import Batch
from gptmill.models.language_model import Losses
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training.histograms import Histograms
from gptmill.training.spike_detector import Observation


class StepMetrics(NamedTuple):
    """The metrics of a step, read on the host."""

    loss: float
    grad_norm: float
    stop_requested: bool
    """Whether any rank was asked to stop."""
    scale: float
    """The loss scale of fp16; 1 in other precisions."""
    objective: float
    """What is minimised: the loss plus auxiliary terms."""
    by_corpus: tuple[float, ...] = ()
    """The loss on each of several corpora; NaN for a corpus without tokens in this step."""
    expert_loads: tuple[float, ...] = ()
    """Tokens routed to each expert of each layer, relative to a uniform load."""

    @property
    def is_overflow(self) -> bool:
        """Whether fp16's loss scale was too high: an expected part of its search, not a sign of divergence."""
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm) and self.scale > 1


@dataclass(frozen=True)
class StepStats:
    """A step's metrics, still being copied from the device. All ranks read the same values."""

    step: int
    epoch: float
    tokens: int
    lr: float
    values: Tensor
    started: DeviceTimestamp
    arrived: DeviceTimestamp
    data_wait_seconds: float = 0.0
    windows: tuple[int, int] = (0, 0)
    """The step's data: first window, and one past the last."""
    num_corpora: int = 0
    num_experts: int = 0
    histograms: Histograms | None = None
    """Of weights and gradients, where they were due."""

    def read(self) -> StepMetrics:
        """Waits for this step, but not for later ones."""
        self.arrived.wait()
        norm, scale, stop, loss, objective, *rest = self.values.tolist()
        sums, counts = rest[: self.num_corpora], rest[self.num_corpora : 2 * self.num_corpora]
        by_corpus = tuple(total / count if count else math.nan for total, count in zip(sums, counts, strict=True))
        loads = _make_loads(rest[2 * self.num_corpora :], self.num_experts)
        return StepMetrics(loss, norm, stop > 0, scale, objective, by_corpus, loads)

    def make_observation(self, metrics: StepMetrics) -> Observation:
        """The input of the spike detector."""
        return Observation(self.step, metrics.loss, metrics.grad_norm, self.windows, metrics.is_overflow)


def make_totals(losses: Losses, batch: Batch, num_corpora: int) -> Tensor:
    """What a micro-batch adds to its step: summed loss and objective, per-corpus loss sums and token counts, tokens per
    expert."""
    parts = [torch.stack([losses.cross_entropy, losses.objective])]
    if num_corpora:
        by_corpus = torch.zeros(2, num_corpora, device=batch.targets.device)
        if losses.per_domain_G is not None and batch.domains is not None:
            by_corpus[0] += losses.per_domain_G
            by_corpus[1].index_add_(0, batch.domains, (batch.targets != IGNORE_INDEX).sum(dim=1, dtype=torch.float32))
        parts.append(by_corpus.flatten())
    if losses.experts_LE is not None:
        parts.append(losses.experts_LE.float().flatten())
    return torch.cat(parts)


def _make_loads(tokens: list[float], num_experts: int) -> tuple[float, ...]:
    """Each expert's tokens relative to a uniform load over its layer."""
    layers = [tokens[first : first + num_experts] for first in range(0, len(tokens), num_experts or 1)]
    return tuple(num_experts * count / (sum(layer) or 1.0) for layer in layers for count in layer)
