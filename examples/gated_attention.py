"""Attention with a sigmoid gate on every head (arXiv:2505.06708), as a plug-in.

gptmill train demo --plugin examples/gated_attention.py --attention gated --gate_bias 1.0
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gptmill


@dataclass(frozen=True)
class Gated:
    """Softmax attention whose heads are gated by their token."""

    gate_bias: float = 2.0
    """gated: initial bias of the gates; 2 opens them to 88 %."""


@gptmill.register("attention", "gated", options=Gated)
class GatedAttention(gptmill.Attention):
    """Multiplies each head's result by a gate that is computed from the token."""

    def __init__(self, config: gptmill.ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gate = nn.Linear(config.embd_size, config.num_heads)
        self.initial_bias = config.attention.gate_bias

    def init_weights(self, _generator: torch.Generator) -> None:
        nn.init.constant_(self.gate.bias, self.initial_bias)

    def forward(
        self, x_BTC: Tensor, context: gptmill.BlockContext, cache: gptmill.LayerKVCache | None = None
    ) -> Tensor:
        q, k, v = self.project_qkv(x_BTC, context.rope)
        heads_BTHD = self.attend(q, k, v, context, cache).unflatten(-1, (self.num_heads, -1))
        return self.proj((heads_BTHD * self.gate(x_BTC).sigmoid()[..., None]).flatten(2))
