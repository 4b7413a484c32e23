"""Lion (Chen et al. 2023, arXiv:2302.06675): weights move by the sign of a momentum, all equally far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gptmill.training.optimizers.found_inf import choose, list_ready, read_found_inf, zero_bad_gradients


class Lion(torch.optim.Optimizer):
    """Lion with decoupled decay. Keeps `exp_avg` of each parameter; honours found_inf without a wait."""

    def __init__(
        self, groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None, "Lion asks for no loss"
        is_bad = read_found_inf(self)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            parameters = list_ready(self, group, "exp_avg")
            if not parameters:
                continue
            averages = [self.state[parameter]["exp_avg"] for parameter in parameters]
            gradients = zero_bad_gradients(is_bad, [parameter.grad for parameter in parameters], averages)
            updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, choose(is_bad, 0.0, -lr))
            torch._foreach_mul_(parameters, choose(is_bad, 1.0, 1 - lr * group["weight_decay"]))
            torch._foreach_add_(parameters, updates)
            torch._foreach_lerp_(averages, gradients, 1 - beta2)
