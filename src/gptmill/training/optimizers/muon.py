"""Muon (Keller Jordan 2024, kellerjordan.github.io/posts/muon): a matrix moves by its momentum made orthogonal.

B: matrices of one shape; R, C: their rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptmill.training.optimizers.found_inf import choose, list_ready, read_found_inf, zero_bad_gradients

# A quintic whose slope at 0 is steep: five rounds bring singular values to about 1, where that is enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
SMALLEST_NORM = 1e-7
BATCH_ELEMENTS = 1 << 27  # numbers that are made orthogonal at once: bounds what a step needs beside its state


class Part(NamedTuple):
    """One matrix, or a stack of them: a view into a parameter, its gradient and its momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled decay, for matrices and stacks of matrices.

    `fused_rows` tells which parameters are several matrices above each other: each is made orthogonal on its own.
    Keeps `momentum_buffer` of each parameter; honours found_inf without a wait. Needs whole matrices, not shards.
    """

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        packed_splits: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self._fused_rows = packed_splits

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all matrices that have a gradient, those of one shape together."""
        assert closure is None, "Muon asks for no loss"
        is_bad = read_found_inf(self)
        for group in self.param_groups:
            parameters = list_ready(self, group, "momentum_buffer")
            for parts in batch_parts([part for parameter in parameters for part in self._split(parameter)]):
                move(parts, group["lr"], group["momentum"], group["weight_decay"], is_bad)

    def _split(self, parameter: nn.Parameter) -> list[Part]:
        assert parameter.grad is not None
        rows = self._fused_rows.get(parameter, (parameter.shape[-2],))
        wholes = (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
        return [Part(*views) for views in zip(*(whole.split(rows, dim=-2) for whole in wholes), strict=True)]


def batch_parts(parts: list[Part]) -> list[list[Part]]:
    """Parts of one shape and type together, as many as fit."""
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Part]] = {}
    for part in parts:
        by_shape.setdefault((part.weight.shape, part.weight.dtype), []).append(part)
    batches = []
    for alike in by_shape.values():
        size = max(1, BATCH_ELEMENTS // alike[0].weight.numel())
        batches += [alike[start : start + size] for start in range(0, len(alike), size)]
    return batches


def move(parts: list[Part], lr: float, momentum: float, weight_decay: float, is_bad: Tensor | None) -> None:
    """One step of matrices of one shape."""
    weights, momenta = [part.weight for part in parts], [part.momentum for part in parts]
    gradients = zero_bad_gradients(is_bad, [part.gradient for part in parts], momenta)
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    ahead = torch.stack(torch._foreach_lerp(gradients, momenta, momentum))
    rows, columns = ahead.shape[-2:]
    updates = orthogonalise(ahead.reshape(-1, rows, columns)).view(ahead.shape).to(ahead.dtype)
    updates *= choose(is_bad, 0.0, -lr * math.sqrt(max(1.0, rows / columns)))
    torch._foreach_mul_(weights, choose(is_bad, 1.0, 1 - lr * weight_decay))
    torch._foreach_add_(weights, list(updates.unbind()))


def orthogonalise(matrices_BRC: Tensor) -> Tensor:
    """The same singular vectors with singular values of about 1, by the iteration of Newton and Schulz."""
    a, b, c = COEFFICIENTS
    is_tall = matrices_BRC.shape[-2] > matrices_BRC.shape[-1]
    x_BRC = matrices_BRC.mT if is_tall else matrices_BRC
    x_BRC = x_BRC / x_BRC.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    if x_BRC.device.type == "cuda":
        x_BRC = x_BRC.bfloat16()
    for _ in range(ROUNDS):
        gram_BRR = x_BRC @ x_BRC.mT
        x_BRC = torch.baddbmm(x_BRC, torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c), x_BRC, beta=a)
    return x_BRC.mT if is_tall else x_BRC
