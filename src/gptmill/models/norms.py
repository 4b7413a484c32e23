"""The norms in front of a model's parts."""

from __future__ import annotations

from torch import Tensor, nn

from gptmill.config.model import ModelConfig, RmsNorm
from gptmill.models.kernels.add_norm import add_norm
from gptmill.models.stream import Normed, Stream


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm that the config chooses, over the residual stream."""
    if isinstance(config.norm, RmsNorm):
        return nn.RMSNorm(config.embd_size, eps=config.norm_eps)
    return nn.LayerNorm(config.embd_size, eps=config.norm_eps, bias=config.norm.norm_bias)


def build_head_norm(config: ModelConfig) -> nn.Module:
    """The norm of each head's queries or keys, whatever the norms of the blocks are."""
    return nn.RMSNorm(config.head_width, eps=config.norm_eps)


def normalise(norm: nn.Module, stream: Stream, fused: bool, narrow: bool = False) -> tuple[Tensor, Normed]:
    """The settled stream, and what the norm makes of it; fused, also in fp8, where that is wanted."""
    if not fused or stream.branch is None:
        x_BTC = stream.settle()
        return x_BTC, Normed(norm(x_BTC))
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    bias_C = norm.bias if isinstance(norm, nn.LayerNorm) else None
    x_BTC, normed_BTC, fp8 = add_norm(
        stream.x_BTC, stream.branch, norm.weight, bias_C, norm.eps, is_rms=isinstance(norm, nn.RMSNorm), narrow=narrow
    )
    return x_BTC, Normed(normed_BTC, fp8)
