"""Lion (Chen et al. 2023, arXiv:2302.06675): updates every weight by the sign of its momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gptmill.training.optimizers.found_inf import init_momenta, mask_gradients, read_found_inf, select_factor


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay. Keeps `exp_avg` per parameter; honours found_inf without a sync."""

    def __init__(
        self, groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None, "Lion takes no closure"
        found_inf = read_found_inf(self)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            parameters = init_momenta(self, group, "exp_avg")
            if not parameters:
                continue
            momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
            gradients = mask_gradients(found_inf, [parameter.grad for parameter in parameters], momenta)
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, select_factor(found_inf, 0.0, -lr))
            torch._foreach_mul_(parameters, select_factor(found_inf, 1.0, 1 - lr * group["weight_decay"]))
            torch._foreach_add_(parameters, updates)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
