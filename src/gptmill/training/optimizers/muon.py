"""Muon (Keller Jordan 2024, kellerjordan.github.io/posts/muon): updates a matrix by its orthogonalised momentum.

B: batch of matrices of one shape; R, C: their rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptmill.training.optimizers.found_inf import init_momenta, mask_gradients, read_found_inf, select_factor

# Newton-Schulz with a quintic that is steep at 0: five iterations bring singular values close enough to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7
BATCH_ELEMENTS = 1 << 27  # elements orthogonalised at once: bounds the temporary memory of a step


class Part(NamedTuple):
    """A matrix or a stack of matrices: views into a parameter, its gradient and its momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices and stacks of matrices.

    `packed_splits` gives the row counts of parameters that pack several matrices: each is orthogonalised on its own.
    Keeps `momentum_buffer` per parameter; honours found_inf without a sync. Needs whole matrices, not shards.
    """

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        packed_splits: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.packed_splits = packed_splits
        self.batches_parameters = True
        """Whether matrices of several parameters share a batch, whose size may choose another GEMM algorithm."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all matrices that have a gradient, batched by shape."""
        assert closure is None, "Muon takes no closure"
        found_inf = read_found_inf(self)
        for group in self.param_groups:
            parameters = init_momenta(self, group, "momentum_buffer")
            for together in [parameters] if self.batches_parameters else [[parameter] for parameter in parameters]:
                for parts in batch_parts([part for parameter in together for part in self._split(parameter)]):
                    update(parts, group["lr"], group["momentum"], group["weight_decay"], found_inf)

    def _split(self, parameter: nn.Parameter) -> list[Part]:
        assert parameter.grad is not None
        rows = self.packed_splits.get(parameter, (parameter.shape[-2],))
        wholes = (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
        return [Part(*views) for views in zip(*(whole.split(rows, dim=-2) for whole in wholes), strict=True)]


def batch_parts(parts: list[Part]) -> list[list[Part]]:
    """Groups parts of the same shape and dtype into batches of at most BATCH_ELEMENTS."""
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Part]] = {}
    for part in parts:
        by_shape.setdefault((part.weight.shape, part.weight.dtype), []).append(part)
    batches = []
    for same in by_shape.values():
        size = max(1, BATCH_ELEMENTS // same[0].weight.numel())
        batches += [same[start : start + size] for start in range(0, len(same), size)]
    return batches


def update(parts: list[Part], lr: float, momentum: float, weight_decay: float, found_inf: Tensor | None) -> None:
    """One step for matrices of the same shape."""
    weights, momenta = [part.weight for part in parts], [part.momentum for part in parts]
    gradients = mask_gradients(found_inf, [part.gradient for part in parts], momenta)
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, momentum))
    rows, columns = nesterov.shape[-2:]
    updates = orthogonalise(nesterov.reshape(-1, rows, columns)).view(nesterov.shape).to(nesterov.dtype)
    updates *= select_factor(found_inf, 0.0, -lr * math.sqrt(max(1.0, rows / columns)))
    torch._foreach_mul_(weights, select_factor(found_inf, 1.0, 1 - lr * weight_decay))
    torch._foreach_add_(weights, list(updates.unbind()))


def orthogonalise(matrices_BRC: Tensor) -> Tensor:
    """Newton-Schulz iteration: keeps the singular vectors and moves the singular values to about 1."""
    a, b, c = COEFFICIENTS
    is_tall = matrices_BRC.shape[-2] > matrices_BRC.shape[-1]
    x_BRC = matrices_BRC.mT if is_tall else matrices_BRC
    x_BRC = x_BRC / x_BRC.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    if x_BRC.device.type == "cuda":
        x_BRC = x_BRC.bfloat16()
    for _ in range(ITERATIONS):
        gram_BRR = x_BRC @ x_BRC.mT
        x_BRC = torch.baddbmm(x_BRC, torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c), x_BRC, beta=a)
    return x_BRC.mT if is_tall else x_BRC
