"""Gradients and losses of a step, added up in the tree of exact ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CPU, make_shards, open_tiny
from torch import Tensor, nn

from gptmill.data.shards.opening import TokenShards
from gptmill.training.exact_sum import Node, TreeSum
from gptmill.training.reduction import ExactReduction, PlainReduction


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def make_gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator) * 10.0**number for number in range(count)]


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_gradients_are_added_in_the_tree(count: int, keeps_gradients: bool) -> None:
    """Where autograd adds to them in place, and where a CUDA graph needs the same tensors all the time."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(5))
    model.unused = nn.Parameter(torch.zeros(2))
    gradients, tree = make_gradients(count), TreeSum()
    for number, gradient in enumerate(gradients):
        tree.push(Node(0, number), [gradient.clone()])
    reduction = ExactReduction(model, CPU, is_sharded=False, keeps_gradients=keeps_gradients)
    for step in range(2):
        reduction.begin_step()
        before = model.weight.grad
        for number, gradient in enumerate(gradients):
            with reduction.micro_batch(number):
                (model.weight * gradient).sum().backward()
        reduction.reduce_gradients()
        assert model.weight.grad is not None
        assert not model.unused.grad.any()
        if keeps_gradients and step:
            assert model.weight.grad is before
        if step == 0:
            expected = tree.finish()[0]
        assert model.weight.grad.equal(expected)
        model.zero_grad(set_to_none=not keeps_gradients)


def test_a_step_that_broke_off_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 1)
    reduction = ExactReduction(model, CPU, is_sharded=False)
    for broken in (True, False):
        model.zero_grad()
        reduction.begin_step()
        for number in range(3 if broken else 1):
            with reduction.micro_batch(number):
                model(torch.ones(1, 2)).sum().backward()
        if not broken:
            reduction.reduce_gradients()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("mini_batch_size", [8, 4])
def test_up_to_two_micro_batches_on_one_rank_round_as_ever(shards: TokenShards, mini_batch_size: int) -> None:
    plain = open_tiny(shards, mini_batch_size=mini_batch_size)
    exact = open_tiny(shards, mini_batch_size=mini_batch_size, exact_ranks=True)
    assert isinstance(plain.state.reduction, PlainReduction)
    assert isinstance(exact.state.reduction, ExactReduction)
    for _ in range(3):
        assert exact.step().read() == plain.step().read()
    for name, parameter in exact.copy_parameters().items():
        assert parameter.equal(plain.copy_parameters()[name])


def test_dropout_of_a_micro_batch_is_that_of_its_number(shards: TokenShards) -> None:
    """Twice the same windows in one step: under the same seed they would have the same masks, and the same loss."""
    tiny = open_tiny(shards, mini_batch_size=4, exact_ranks=True, dropout=0.5)
    seen: list[float] = []
    run = tiny.state.micro_batch_runner.run
    batches = []

    def spy(batch: object, scale: float) -> object:
        batches.append(batch)
        losses = run(batches[0], scale)
        seen.append(losses.cross_entropy.item())
        return losses

    object.__setattr__(tiny.state.micro_batch_runner, "run", spy)
    tiny.step()
    tiny.state.step, tiny.state.windows_read = 0, 0
    tiny.state.restore(replace(open_tiny(shards).state.make_checkpoint({})), "the start")
    tiny.step()
    assert len(set(seen)) == 2
    assert seen[:2] == seen[2:]
