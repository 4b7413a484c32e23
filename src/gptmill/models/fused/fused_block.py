"""A block whose residual additions are fused with the norms behind them.

Shape suffixes: B batch, T sequence, C channels.
"""

from __future__ import annotations

from torch import Tensor

from gptmill.models.attention import BlockContext
from gptmill.models.block import Block
from gptmill.models.fused.fused_attention import FUSED_ATTENTIONS, FusedAttention
from gptmill.models.fused.fused_mlp import FUSED_FEED_FORWARDS, FusedGatedMlp, FusedMlp
from gptmill.models.fused.pending_residual import Branch, PendingResidual, add_and_normalise
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.mixture_of_experts import MixtureOfExperts, RouterStats


class FusedBlock(Block):
    """The same parameters; hands on a pending residual instead of a sum."""

    attention_classes = FUSED_ATTENTIONS
    feed_forward_classes = FUSED_FEED_FORWARDS
    attention: FusedAttention
    mlp: FusedMlp | FusedGatedMlp | MixtureOfExperts
    copies_bias = False
    """Whether the pending residual holds a copy of the last layer's bias, whose own memory may be freed by then."""

    def forward(  # type: ignore[override]
        self, x: Tensor | PendingResidual, context: BlockContext, cache: LayerKVCache | None = None
    ) -> tuple[PendingResidual, RouterStats | None]:
        """The first block gets the embeddings, a tensor; the others the pending residual of the block before."""
        pending = x if isinstance(x, PendingResidual) else PendingResidual(x)
        x_BTC, normed = add_and_normalise(self.attention_norm, pending, self.attention.wants_fp8_input)
        pending = PendingResidual(x_BTC, self._drop(self.attention(normed, context, cache)))
        if isinstance(self.mlp, MixtureOfExperts):
            x_BTC, normed = add_and_normalise(self.mlp_norm, pending)
            y_BTC, stats = self.mlp(normed.x_BTC, context.counts_BT)
            return PendingResidual(x_BTC, self._drop(Branch(y_BTC))), stats
        x_BTC, normed = add_and_normalise(self.mlp_norm, pending, self.mlp.wants_fp8_input)
        branch = self.mlp(normed)
        return PendingResidual(x_BTC, self._drop(branch.copy_bias() if self.copies_bias else branch)), None

    def _drop(self, branch: Branch) -> Branch:
        p = self.dropout.p
        return branch.drop(p) if self.training and p > 0 else branch
