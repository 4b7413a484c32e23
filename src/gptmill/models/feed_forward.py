"""The other half of a block: what is done with each token by itself.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import Gelu, ModelConfig, Moe, SwiGlu
from gptmill.models.experts import MixtureOfExperts


class Mlp(nn.Module):
    """Widen, GELU (tanh) or the square of ReLU, narrow again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gelu = isinstance(config.feed_forward, Gelu)
        self.up = nn.Linear(config.embd_size, config.hidden_size, bias=config.bias)
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = self.up(x_BTC)
        x = F.gelu(x, approximate="tanh") if self.is_gelu else F.relu(x).square()
        return self.proj(x)  # type: ignore[no-any-return]


class GatedMlp(nn.Module):
    """Widen twice, let SiLU of the one gate the other, narrow again (Shazeer 2020). The gate's rows come first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.embd_size, 2 * config.hidden_size, bias=config.bias)
        self.fused_rows = {"gate_up.weight": (config.hidden_size, config.hidden_size)}
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)  # type: ignore[no-any-return]


def build_feed_forward(config: ModelConfig) -> Mlp | GatedMlp | MixtureOfExperts:
    """The variant that the config chooses."""
    if isinstance(config.feed_forward, Moe):
        return MixtureOfExperts(config)
    return GatedMlp(config) if isinstance(config.feed_forward, SwiGlu) else Mlp(config)
