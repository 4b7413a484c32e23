"""The feed-forward half of a block: what happens to each token by itself.

Shape suffixes: B batch, T sequence, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import Gelu, ModelConfig, Moe, Relu2, SwiGlu
from gptmill.models.mixture_of_experts import MixtureOfExperts


class Mlp(nn.Module):
    """Two linear layers with GELU (tanh approximation) or ReLU² between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gelu = isinstance(config.feed_forward, Gelu)
        self.up = nn.Linear(config.embd_size, config.hidden_size, bias=config.bias)
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.proj(self.activate(self.up(x_BTC)))  # type: ignore[no-any-return]

    def activate(self, x: Tensor) -> Tensor:
        """GELU or ReLU²."""
        return F.gelu(x, approximate="tanh") if self.is_gelu else F.relu(x).square()


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer 2020): SiLU of one projection gates another. The gate's rows come first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.embd_size, 2 * config.hidden_size, bias=config.bias)
        self.packed_splits = {"gate_up.weight": (config.hidden_size, config.hidden_size)}
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)  # type: ignore[no-any-return]


FEED_FORWARDS: dict[type, type[nn.Module]] = {Gelu: Mlp, Relu2: Mlp, SwiGlu: GatedMlp, Moe: MixtureOfExperts}
"""The module of each variant of `ModelConfig.feed_forward`."""
