"""The optimizer holds every parameter once, and decays the matrices alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptmill.config.run import ModelConfig, OptimizerConfig
from gptmill.models.gpt import build_gpt
from gptmill.training.optimizers import build_optimizer, step_unless

CONFIG = OptimizerConfig(max_lr=3e-4, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-6)


def build_model() -> nn.Module:
    return build_gpt(ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=8), 64, seed=0)


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = build_model()
    optimizer = build_optimizer(model, CONFIG, torch.device("cpu"))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_matrix = not name.endswith("bias") and "norm" not in name
        assert (parameter.dim() == 2) == is_matrix, name
        assert decays[id(parameter)] == (0.25 if is_matrix else 0.0), name


def test_every_parameter_is_in_exactly_one_group() -> None:
    model = build_model()
    optimizer = build_optimizer(model, CONFIG, torch.device("cpu"))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_the_numbers_of_the_config_reach_every_group() -> None:
    for group in build_optimizer(build_model(), CONFIG, torch.device("cpu")).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-6)


def test_a_step_without_gradient_shrinks_matrices_and_leaves_vectors() -> None:
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, CONFIG, torch.device("cpu")).step()
    for name, parameter in model.named_parameters():
        expected = 2.0 * (1 - 3e-4 * 0.25) if parameter.dim() == 2 else 2.0
        assert parameter.detach().mean().item() == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_bad_step_changes_nothing_and_a_good_one_what_it_always_does(is_bad: bool) -> None:
    plain, asked = build_model(), build_model()
    optimizers = [build_optimizer(model, CONFIG, torch.device("cpu")) for model in (plain, asked)]
    for _ in range(2):
        for model in (plain, asked):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
        if not is_bad:
            optimizers[0].step()
        step_unless(optimizers[1], torch.tensor(is_bad))
    for one, other in zip(plain.parameters(), asked.parameters(), strict=True):
        assert one.equal(other)
        state = optimizers[1].state[other]
        assert state["step"].item() == (0 if is_bad else 2)
        assert bool(state["exp_avg"].any()) is not is_bad


def test_an_optimizer_that_would_ignore_the_wish_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="fused"):
        step_unless(torch.optim.AdamW([parameter], fused=False), torch.tensor(True))
