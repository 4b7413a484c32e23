"""One layer of the model.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

from torch import Tensor, nn

from gptmill.config.model import ModelConfig
from gptmill.models.attention import Attention
from gptmill.models.attention import BlockContext as BlockContext
from gptmill.models.cache import LayerCache
from gptmill.models.experts import MixtureOfExperts, RouterStats
from gptmill.models.feed_forward import build_feed_forward
from gptmill.models.norms import build_norm


class Block(nn.Module):
    """Attention, then the feed-forward part, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = build_norm(config)
        self.mlp = build_feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTC: Tensor, context: BlockContext, cache: LayerCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """The stream after this layer, and how tokens were spread where there are experts."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), context, cache))
        stats: RouterStats | None = None
        if isinstance(self.mlp, MixtureOfExperts):
            y_BTC, stats = self.mlp(self.mlp_norm(x_BTC), context.counts_BT)
        else:
            y_BTC = self.mlp(self.mlp_norm(x_BTC))
        return x_BTC + self.dropout(y_BTC), stats
