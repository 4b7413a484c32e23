"""Signum, signSGD with momentum (arXiv:1802.04434), as a plug-in.

gptmill train demo --plugin examples/signum.py --optimizer signum --max_lr 3e-4
"""

from dataclasses import dataclass

import torch

import gptmill


@dataclass(frozen=True)
class SignumOptions:
    """Signum: the sign of the momentum, times the learning rate."""

    momentum: float = 0.9
    """signum: decay rate of the momentum."""


@gptmill.register("optimizer", "signum", options=SignumOptions)
class Signum(torch.optim.Optimizer):
    """All of its state is in tensors, so that a checkpoint holds it."""

    def __init__(self, groups: list[dict], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"])
