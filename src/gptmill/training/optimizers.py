"""Optimizers, built for a model.

Every optimizer of gptmill honours `found_inf`, the attribute by which torch's GradScaler tells a fused optimizer to
leave everything as it is: where this tensor is 1, step() changes no parameter, no moment and no counter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptmill.config.run import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter, beside its count of steps
FUSED_DEVICES = ("cuda", "cpu", "mps")


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW that decays matrices (embeddings included) and leaves biases and norms alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.max_lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        fused=device.type in FUSED_DEVICES,
    )


def step_unless(optimizer: torch.optim.Optimizer, is_bad: Tensor) -> None:
    """Updates, or leaves everything as it is where `is_bad` holds. On CUDA the device decides, and no one waits."""
    if is_bad.device.type == "mps":
        # Its fused kernel ignored found_inf until pytorch/pytorch#186360; the host reads every step there anyway.
        if not is_bad.item():
            optimizer.step()
        return
    assert all(group["fused"] for group in optimizer.param_groups), "only fused optimizers can leave an update out"
    vars(optimizer)["found_inf"] = is_bad.float()
    optimizer.step()
    del vars(optimizer)["found_inf"]
