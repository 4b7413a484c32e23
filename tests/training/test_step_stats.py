"""Metrics of a step: the sums over its micro-batches, and what is read from them."""

from __future__ import annotations

import math

import torch

from gptmill.data.batches.batch import Batch
from gptmill.models.gpt import Losses
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training.step_stats import StepMetrics, StepStats, Totals

CPU = torch.device("cpu")


def read(totals: Totals, tokens: int) -> StepMetrics:
    values = torch.cat([torch.zeros(3), totals.make_tensor(tokens)])
    now = DeviceTimestamp(CPU)
    return StepStats(1, 0.0, tokens, 0.1, values, now, now, num_corpora=2, num_experts=totals.num_experts).read()


def make_losses(by_corpus: list[float], experts: list[list[float]]) -> Losses:
    return Losses(torch.tensor(9.0), torch.tensor(6.0), torch.tensor(by_corpus), torch.tensor(experts))


def test_losses_of_corpora_leave_out_padding_and_loads_are_those_of_a_layer() -> None:
    targets = torch.tensor([[1, 2, IGNORE_INDEX, IGNORE_INDEX], [1, 2, 3, 4]])
    batch, totals = Batch(targets, targets, None, torch.tensor([0, 1])), Totals(CPU, 2)
    totals.add(make_losses([4.0, 8.0], [[3.0, 1.0], [2.0, 2.0]]), batch)
    totals.add(make_losses([2.0, 4.0], [[1.0, 3.0], [4.0, 0.0]]), batch)
    metrics = read(totals, tokens=12)
    assert (metrics.loss, metrics.objective) == (1.0, 1.5)
    assert metrics.by_corpus == (1.5, 1.5)
    assert metrics.expert_loads == (1.0, 1.0, 1.5, 0.5)


def test_a_corpus_that_a_step_has_nothing_of_has_no_loss() -> None:
    targets = torch.tensor([[1, 2]])
    totals = Totals(CPU, 2)
    totals.add(make_losses([0.0, 3.0], [[1.0, 1.0]]), Batch(targets, targets, None, torch.tensor([1])))
    first, second = read(totals, tokens=2).by_corpus
    assert math.isnan(first)
    assert second == 1.5
