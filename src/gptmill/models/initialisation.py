"""Fresh weights: GPT-2's initialisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gptmill.config.model import ModelConfig

INIT_STD = 0.02
INIT_GATE = 0.5


class SkipInit(TorchFunctionMode):
    """Within it, layers are built without torch's own initialisation, whose result nobody would use."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """Normal weights, zero biases, and residual projections scaled down by depth, or zero with `zero_init`.

    A module of a plug-in that has a method `init_weights(generator)` then initialises its own.
    """
    for name, parameter in model.named_parameters():
        init_parameter(name, parameter, config, generator)
    for module in model.modules():
        if own := getattr(module, "init_weights", None):
            own(generator)


@torch.no_grad()
def init_parameter(name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fills one parameter. Call it for all of a model in their order, since they draw from one random stream."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1.0)
    elif name.endswith("value_gate"):
        parameter.fill_(INIT_GATE)
    else:
        residual_std = 0.0 if config.zero_init else INIT_STD / math.sqrt(2 * config.num_layers)
        std = residual_std if name.endswith(("proj.weight", "down_proj")) else INIT_STD
        parameter.normal_(0.0, std, generator=generator)
