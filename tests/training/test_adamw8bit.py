"""AdamW with small moments: close to AdamW, a quarter of its memory, and saved as plain tensors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gptmill.config.errors import UserError
from gptmill.config.optimizer import AdamW, AdamW8bit, OptimizerConfig
from gptmill.training.optimizers import OptimizerContainer, build_optimizer

CPU = torch.device("cpu")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def build_both(chosen: AdamW | AdamW8bit) -> tuple[nn.Module, OptimizerContainer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4))
    return model, build_optimizer(model, OptimizerConfig(chosen, max_lr=1e-3), CPU)


def take_step(model: nn.Module, optimizer: OptimizerContainer, step: int, *, is_bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step_unless(torch.tensor(is_bad))
    optimizer.zero_grad()


def copy_all(model: nn.Module, optimizer: OptimizerContainer) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def test_without_torchao_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[quant\]'"):
        build_both(AdamW8bit())


@pytest.mark.slow
@needs_torchao
def test_it_moves_weights_about_as_adamw_does() -> None:
    (model, optimizer), (twin, plain) = build_both(AdamW8bit()), build_both(AdamW())
    start = model[0].weight.detach().clone()
    optimizer.init_state()
    for step in range(5):
        for pair in ((model, optimizer), (twin, plain)):
            pair[1].set_lr(5e-4, 1e-3)
            take_step(*pair, step)
    moved = (twin[0].weight - start).norm()
    assert 0 < (model[0].weight - twin[0].weight).norm() / moved < 0.1
    torch.testing.assert_close(model[1].bias, twin[1].bias, rtol=1e-4, atol=1e-6)  # too small for 8 bits


@needs_torchao
def test_large_moments_take_a_byte_each() -> None:
    _, optimizer = build_both(AdamW8bit())
    optimizer.init_state()
    state = optimizer.state_tensors()
    assert state["0.weight/exp_avg.codes"].dtype == state["0.weight/exp_avg_sq.codes"].dtype == torch.uint8
    assert state["0.weight/exp_avg.codes"].shape == (128, 64)
    assert state["1.bias/exp_avg"].dtype == torch.float32
    assert all(type(tensor) is Tensor for tensor in state.values())


@needs_torchao
def test_a_bad_step_changes_nothing() -> None:
    model, optimizer = build_both(AdamW8bit())
    take_step(model, optimizer, 0)
    before = copy_all(model, optimizer)
    take_step(model, optimizer, 1, is_bad=True)
    after = copy_all(model, optimizer)
    assert after.keys() == before.keys()
    assert all(tensor.equal(before[name]) for name, tensor in after.items())


@needs_torchao
def test_priming_changes_no_weight_and_no_first_step() -> None:
    (model, optimizer), (twin, unprimed) = build_both(AdamW8bit()), build_both(AdamW8bit())
    optimizer.init_state()
    assert all(one.equal(other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizer.members[0].param_groups[0]["lr"].item() == pytest.approx(1e-3)
    for step in range(2):
        take_step(model, optimizer, step)
        take_step(twin, unprimed, step)
    found, expected = copy_all(model, optimizer), copy_all(twin, unprimed)
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


@needs_torchao
def test_what_was_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = build_both(AdamW8bit())
    for step in range(2):
        take_step(model, optimizer, step)
    save_file(optimizer.state_tensors(), tmp_path / "optimizer.safetensors")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take_step(model, optimizer, 2)

    resumed, again = build_both(AdamW8bit())
    again.init_state()
    resumed.load_state_dict(weights)
    again.load_state(load_file(tmp_path / "optimizer.safetensors"))
    take_step(resumed, again, 2)
    found, expected = copy_all(resumed, again), copy_all(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
