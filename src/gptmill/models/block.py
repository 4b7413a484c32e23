"""One transformer block: attention and the feed-forward part, each behind its norm (pre-norm) and added to the
residual stream.

Shape suffixes: B batch, T sequence, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from gptmill.config.model import ModelConfig
from gptmill.models.attention import ATTENTIONS, BlockContext
from gptmill.models.feed_forward import FEED_FORWARDS
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.mixture_of_experts import MixtureOfExperts, RouterStats
from gptmill.models.norms import build_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_classes: ClassVar[Mapping[type, type[nn.Module]]] = ATTENTIONS
    feed_forward_classes: ClassVar[Mapping[type, type[nn.Module]]] = FEED_FORWARDS

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = self.attention_classes[type(config.attention)](config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = self.feed_forward_classes[type(config.feed_forward)](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTC: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """The hidden states after this block, and its router's statistics where it has experts."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), context, cache))
        if isinstance(self.mlp, MixtureOfExperts):
            y_BTC, stats = self.mlp(self.mlp_norm(x_BTC), context.counts_BT)
        else:
            y_BTC, stats = self.mlp(self.mlp_norm(x_BTC)), None
        return x_BTC + self.dropout(y_BTC), stats
