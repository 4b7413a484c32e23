"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), as the config chooses."""

from __future__ import annotations

import warnings

from torch import nn

from gptmill.config.model import ModelConfig, RmsNorm


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm over the residual stream, in front of a block's parts and of the LM head."""
    if isinstance(config.norm, RmsNorm):
        return _build_rms_norm(config.embd_size, config)
    return nn.LayerNorm(config.embd_size, eps=config.norm_eps, bias=config.norm.norm_bias)


def build_head_norm(config: ModelConfig) -> nn.Module:
    """QK-norm: the norm of each head's queries or keys, always an RMSNorm."""
    return _build_rms_norm(config.head_width, config)


def _build_rms_norm(width: int, config: ModelConfig) -> nn.RMSNorm:
    # torch warns that it has no fused kernel for activations in half precision and a weight in fp32.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    return nn.RMSNorm(width, eps=config.norm_eps)
