"""AdamW: torch's fused kernel, which honours found_inf."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gptmill.config.optimizer import AdamW, Muon, OptimizerConfig
from gptmill.training.optimizers.param_groups import make_param_groups

FUSED_DEVICES = ("cuda", "cpu", "mps")


def build_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW for all parameters, or for those that Muon does not update."""
    chosen = config.optimizer
    assert isinstance(chosen, AdamW | Muon)
    return torch.optim.AdamW(
        make_param_groups(parameters, config.max_lr, config.weight_decay),
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.eps,
        fused=device.type in FUSED_DEVICES,
    )
