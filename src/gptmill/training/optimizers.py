"""Optimizers, built for a model."""

from __future__ import annotations

import torch
from torch import nn

from gptmill.config.run import OptimizerConfig

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
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in FUSED_DEVICES,
    )
