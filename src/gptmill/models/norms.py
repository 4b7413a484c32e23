"""The norms in front of a model's parts."""

from __future__ import annotations

from torch import nn

from gptmill.config.model import ModelConfig, RmsNorm


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm that the config chooses, over the residual stream."""
    if isinstance(config.norm, RmsNorm):
        return nn.RMSNorm(config.embd_size, eps=config.norm_eps)
    return nn.LayerNorm(config.embd_size, eps=config.norm_eps, bias=config.norm.norm_bias)


def build_head_norm(config: ModelConfig) -> nn.Module:
    """The norm of each head's queries or keys, whatever the norms of the blocks are."""
    return nn.RMSNorm(config.head_width, eps=config.norm_eps)
