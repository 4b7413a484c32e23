"""Metrics of a step: the sums over its micro-batches, and what is read from them."""

from __future__ import annotations

import math

import torch

from gptmill.data.batches.batch import Batch
from gptmill.models.language_model import Losses
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.world import World
from gptmill.training.reduction import PlainReduction
from gptmill.training.step_stats import StepMetrics, StepStats, make_totals

CPU = torch.device("cpu")


def read(parts: list[tuple[Losses, Batch]], tokens: int) -> StepMetrics:
    reduction = PlainReduction()
    for number, (losses, batch) in enumerate(parts):
        reduction.add_totals(number, make_totals(losses, batch, 2))
    values = torch.cat([torch.zeros(2), reduction.reduce_totals(False, tokens, World(0, 1, CPU))])
    now = DeviceTimestamp(CPU)
    return StepStats(1, 0.0, tokens, 0.1, values, now, now, num_corpora=2, num_experts=2).read()


def make_losses(by_corpus: list[float], experts: list[list[float]]) -> Losses:
    return Losses(torch.tensor(9.0), torch.tensor(6.0), torch.tensor(by_corpus), torch.tensor(experts))


def test_losses_of_corpora_leave_out_padding_and_loads_are_those_of_a_layer() -> None:
    targets = torch.tensor([[1, 2, IGNORE_INDEX, IGNORE_INDEX], [1, 2, 3, 4]])
    batch = Batch(targets, targets, None, torch.tensor([0, 1]))
    first = make_losses([4.0, 8.0], [[3.0, 1.0], [2.0, 2.0]])
    second = make_losses([2.0, 4.0], [[1.0, 3.0], [4.0, 0.0]])
    metrics = read([(first, batch), (second, batch)], tokens=12)
    assert (metrics.loss, metrics.objective) == (1.0, 1.5)
    assert metrics.by_corpus == (1.5, 1.5)
    assert metrics.expert_loads == (1.0, 1.0, 1.5, 0.5)


def test_a_corpus_that_a_step_has_nothing_of_has_no_loss() -> None:
    targets = torch.tensor([[1, 2]])
    losses = make_losses([0.0, 3.0], [[1.0, 1.0]])
    first, second = read([(losses, Batch(targets, targets, None, torch.tensor([1])))], tokens=2).by_corpus
    assert math.isnan(first)
    assert second == 1.5
