"""One layer of the model.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

import torch
from torch import nn

from gptmill.config.model import ModelConfig
from gptmill.models.attention import Attention
from gptmill.models.attention import BlockContext as BlockContext
from gptmill.models.feed_forward import build_feed_forward
from gptmill.models.kernels.dropout_mask import dropout_mask
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.mixture_of_experts import MixtureOfExperts, RouterStats
from gptmill.models.norms import build_norm, normalise
from gptmill.models.stream import Branch, Stream


class Block(nn.Module):
    """Attention, then the feed-forward part, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.fused = False
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = build_feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, stream: Stream, context: BlockContext, cache: LayerKVCache | None = None
    ) -> tuple[Stream, RouterStats | None]:
        """The stream after this layer, and how tokens were spread where there are experts."""
        x_BTC, normed = normalise(self.attention_norm, stream, self.fused, self.attention.wants_fp8_input)
        stream = Stream(x_BTC, self._drop(self.attention(normed, context, cache)))
        if isinstance(self.mlp, MixtureOfExperts):
            x_BTC, normed = normalise(self.mlp_norm, stream, self.fused)
            y_BTC, stats = self.mlp(normed.x_BTC, context.counts_BT)
            return Stream(x_BTC, self._drop(Branch(y_BTC))), stats
        x_BTC, normed = normalise(self.mlp_norm, stream, self.fused, self.mlp.wants_fp8_input)
        return Stream(x_BTC, self._drop(self.mlp(normed))), None

    def _drop(self, branch: Branch) -> Branch:
        """Fused, only the numbers to keep are drawn: the bias is still to be added."""
        if not self.fused:
            return Branch(self.dropout(branch.y_BTC), branch.bias_C)
        p = self.dropout.p
        if p == 0 or not self.training:
            return branch
        keep_BTC = dropout_mask(branch.y_BTC.detach(), p)
        factor = torch.full((), 1 / (1 - p), device=keep_BTC.device)
        return Branch(branch.y_BTC, branch.bias_C, keep_BTC, factor)
