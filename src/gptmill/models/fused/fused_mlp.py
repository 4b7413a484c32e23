"""Feed-forward parts that use the kernels: a norm's result in, a pending branch out.

Shape suffixes: B batch, T sequence, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptmill.config.model import Gelu, ModelConfig, Moe, Relu2, SwiGlu
from gptmill.models.feed_forward import GatedMlp, Mlp
from gptmill.models.fused.fp8_layers import Fp8Linear, apply_layer, apply_weight, find_fp8_input, wants_fp8_input
from gptmill.models.fused.pending_residual import Branch, Normed, apply_without_bias, to_autocast_dtype
from gptmill.models.kernels.bias_gelu import bias_gelu
from gptmill.models.kernels.gemm import is_large
from gptmill.models.kernels.gemm_gelu import gelu_feed_forward
from gptmill.models.kernels.swiglu import swiglu
from gptmill.models.mixture_of_experts import MixtureOfExperts


class FusedMlp(Mlp):
    """GELU in the epilogues of large GEMMs, or in a kernel of its own together with the bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.allows_epilogue = True

    @property
    def wants_fp8_input(self) -> bool:
        return wants_fp8_input(self.up)

    def forward(self, normed: Normed) -> Branch:  # type: ignore[override]
        if not self.is_gelu or self.up.bias is None:
            return apply_without_bias(self.proj, self.activate(apply_layer(self.up, *normed)))
        if not self._suits_epilogue(normed.x_BTC):
            return apply_without_bias(self.proj, bias_gelu(apply_weight(self.up, *normed), self.up.bias))
        x_BTC = to_autocast_dtype(normed.x_BTC)
        x_fp8 = find_fp8_input(self.up, x_BTC.flatten(0, 1), normed.x_fp8)
        y_BTC = gelu_feed_forward(x_BTC, self.up.weight, self.up.bias, self.proj.weight, x_fp8)
        return Branch(y_BTC, self.proj.bias)

    def _suits_epilogue(self, x_BTC: Tensor) -> bool:
        """Whether the GEMMs are large enough to be autotuned, and those of the backward pass not in fp8."""
        if not self.allows_epilogue or torch.are_deterministic_algorithms_enabled():
            return False
        is_full_fp8 = isinstance(self.up, Fp8Linear) and not self.wants_fp8_input
        if is_full_fp8 or isinstance(self.proj, Fp8Linear):
            return False
        return is_large(x_BTC.flatten(0, 1), self.up.weight.t())


class FusedGatedMlp(GatedMlp):
    """SwiGLU with both of its gradients in one pass."""

    @property
    def wants_fp8_input(self) -> bool:
        return wants_fp8_input(self.gate_up)

    def forward(self, normed: Normed) -> Branch:  # type: ignore[override]
        return apply_without_bias(self.proj, swiglu(apply_layer(self.gate_up, *normed)))


FUSED_FEED_FORWARDS: dict[type, type[nn.Module]] = {
    Gelu: FusedMlp,
    Relu2: FusedMlp,
    SwiGlu: FusedGatedMlp,
    Moe: MixtureOfExperts,
}
"""The module of each variant; a mixture of experts has no fused form."""
