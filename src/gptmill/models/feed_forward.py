"""The other half of a block: what is done with each token by itself.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import Gelu, ModelConfig, Moe, SwiGlu
from gptmill.models.fp8 import Fp8Linear, apply_layer, apply_weight, wants_fp8_input
from gptmill.models.kernels.bias_gelu import bias_gelu
from gptmill.models.kernels.gemm import is_large
from gptmill.models.kernels.gemm_gelu import gelu_feed_forward
from gptmill.models.kernels.swiglu import swiglu
from gptmill.models.mixture_of_experts import MixtureOfExperts
from gptmill.models.stream import Branch, Normed, apply_last


class Mlp(nn.Module):
    """Widen, GELU (tanh) or the square of ReLU, narrow again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fused = False
        self.leaves_gelu = True  # to the matmuls around it, where it is fused
        self.is_gelu = isinstance(config.feed_forward, Gelu)
        self.up = nn.Linear(config.embd_size, config.hidden_size, bias=config.bias)
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    @property
    def wants_fp8_input(self) -> bool:
        """Whether what comes in is wanted in fp8 too."""
        return wants_fp8_input(self.up)

    def forward(self, normed: Normed) -> Branch:
        if self.fused and self.is_gelu and self.up.bias is not None:
            if self._is_for_matmuls(normed.x_BTC):
                return Branch(gelu_feed_forward(normed, self.up, self.proj), self.proj.bias)
            x = bias_gelu(apply_weight(self.up, *normed), self.up.bias)
        else:
            x = apply_layer(self.up, *normed)
            x = F.gelu(x, approximate="tanh") if self.is_gelu else F.relu(x).square()
        return apply_last(self.proj, x, self.fused)

    def _is_for_matmuls(self, x_BTC: Tensor) -> bool:
        """Whether GELU is left to the matmuls before and after it: large ones, and those of its way back not in fp8."""
        if not self.leaves_gelu or torch.are_deterministic_algorithms_enabled():
            return False
        is_as_usual = not isinstance(self.proj, Fp8Linear) and (
            self.wants_fp8_input or not isinstance(self.up, Fp8Linear)
        )
        return is_as_usual and is_large(x_BTC.flatten(0, 1), self.up.weight.t())


class GatedMlp(nn.Module):
    """Widen twice, let SiLU of the one gate the other, narrow again (Shazeer 2020). The gate's rows come first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fused = False
        self.gate_up = nn.Linear(config.embd_size, 2 * config.hidden_size, bias=config.bias)
        self.packed_splits = {"gate_up.weight": (config.hidden_size, config.hidden_size)}
        self.proj = nn.Linear(config.hidden_size, config.embd_size, bias=config.bias)

    @property
    def wants_fp8_input(self) -> bool:
        """Whether what comes in is wanted in fp8 too."""
        return wants_fp8_input(self.gate_up)

    def forward(self, normed: Normed) -> Branch:
        x = apply_layer(self.gate_up, *normed)
        if self.fused:
            return apply_last(self.proj, swiglu(x), self.fused)
        gate, up = x.chunk(2, dim=-1)
        return apply_last(self.proj, F.silu(gate) * up, self.fused)


def build_feed_forward(config: ModelConfig) -> Mlp | GatedMlp | MixtureOfExperts:
    """The variant that the config chooses."""
    if isinstance(config.feed_forward, Moe):
        return MixtureOfExperts(config)
    return GatedMlp(config) if isinstance(config.feed_forward, SwiGlu) else Mlp(config)
