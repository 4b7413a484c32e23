"""The average of the weights: its formula, its way through a save, and its visit to the model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_shards, open_tiny
from torch import Tensor, nn

from gptmill.training.ema import EmaWeights

GOOD, BAD = torch.tensor(False), torch.tensor(True)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))


@torch.no_grad()
def change_weights(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def copy_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def test_it_starts_as_the_weights_and_apart_from_them() -> None:
    model = build_model()
    average = EmaWeights.build(model, 0.9)
    start = copy_all(dict(model.state_dict()))
    assert is_same(average.tensors(), start)
    change_weights(model, 1)
    assert is_same(average.tensors(), start)


@pytest.mark.parametrize("flag", [None, GOOD])
def test_it_is_the_sum_that_the_formula_gives(flag: Tensor | None) -> None:
    model, decay, steps = build_model(), 0.8, 6
    average = EmaWeights.build(model, decay)
    expected = model[0].weight.detach().double() * decay**steps
    for step in range(steps):
        change_weights(model, step)
        average.update(model, flag)
        expected += (1 - decay) * decay ** (steps - 1 - step) * model[0].weight.detach().double()
    torch.testing.assert_close(average.tensors()["0.weight"].double(), expected, rtol=1e-5, atol=1e-6)


def test_an_update_that_was_left_out_does_not_count() -> None:
    model = build_model()
    average = EmaWeights.build(model, 0.8)
    change_weights(model, 1)
    average.update(model, GOOD)
    before = copy_all(average.tensors())
    average.update(model, BAD)
    assert is_same(average.tensors(), before)
    average.update(model, GOOD)
    assert not is_same(average.tensors(), before)


def test_what_was_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = build_model()
    average = EmaWeights.build(model, 0.99)
    for step in range(3):
        change_weights(model, step)
        average.update(model, GOOD)
    save_file(average.tensors(), tmp_path / "ema.safetensors")
    again = EmaWeights.build(build_model(), 0.99)
    again.load(load_file(tmp_path / "ema.safetensors"))
    assert is_same(again.tensors(), average.tensors())
    for step in range(3, 6):
        change_weights(model, step)
        average.update(model, GOOD)
        again.update(model, GOOD)
    assert is_same(again.tensors(), average.tensors())


def test_averages_of_another_model_are_refused() -> None:
    with pytest.raises(AssertionError, match="another model"):
        EmaWeights.build(build_model(), 0.9).load({"other": torch.zeros(1)})


def test_the_model_has_the_averages_for_a_while() -> None:
    model = build_model()
    average = EmaWeights.build(model, 0.9)
    change_weights(model, 1)
    average.update(model)
    weights, averages = copy_all(dict(model.state_dict())), copy_all(average.tensors())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with average.swapped(model):
        assert is_same(dict(model.state_dict()), averages)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert is_same(dict(model.state_dict()), weights)
    assert is_same(average.tensors(), averages)


def test_weights_come_back_when_the_evaluation_fails() -> None:
    model = build_model()
    average = EmaWeights.build(model, 0.9)
    change_weights(model, 1)
    weights = copy_all(dict(model.state_dict()))
    with pytest.raises(ZeroDivisionError), average.swapped(model):
        1 / 0  # noqa: B018
    assert is_same(dict(model.state_dict()), weights)


def test_a_run_s_average_does_not_count_a_step_that_was_left_out(text_file: Path) -> None:
    tiny = open_tiny(make_shards(text_file), ema_decay=0.5)
    assert tiny.state.ema is not None
    tiny.step()
    before = {name: average.clone() for name, average in tiny.state.ema.tensors().items()}
    handle = tiny.state.model.token_embedding.weight.register_hook(lambda gradient: gradient * math.nan)
    tiny.step()
    handle.remove()
    assert all(average.equal(before[name]) for name, average in tiny.state.ema.tensors().items())
