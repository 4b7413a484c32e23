"""Lion: the sign of an interpolation moves the weights, another interpolation is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptmill.training.optimizers.lion import Lion

LR, BETA1, BETA2, DECAY = 0.01, 0.9, 0.99, 0.1


def test_steps_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 7, generator=generator))
    optimizer = Lion([{"params": [weight], "weight_decay": DECAY}], LR, (BETA1, BETA2))
    expected, momentum = weight.detach().double(), torch.zeros(5, 7, dtype=torch.float64)
    for _ in range(5):
        weight.grad = torch.randn(5, 7, generator=generator)
        gradient = weight.grad.double()
        update = torch.sign(BETA1 * momentum + (1 - BETA1) * gradient)
        expected = expected - LR * (update + DECAY * expected)
        momentum = BETA2 * momentum + (1 - BETA2) * gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_how_large_a_gradient_is_does_not_matter(factor: float) -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = Lion([weight], LR, (BETA1, BETA2))
    weight.grad = torch.tensor([1.0, -2.0, 0.0, 3.0]) * factor
    optimizer.step()
    assert weight.tolist() == pytest.approx([-LR, LR, 0.0, -LR])


def test_parameters_without_gradient_stay() -> None:
    used, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lion([{"params": [used, idle], "weight_decay": DECAY}], LR, (BETA1, BETA2))
    used.grad = torch.ones(3)
    optimizer.step()
    assert idle.equal(torch.ones(3))
    assert not used.equal(torch.ones(3))
