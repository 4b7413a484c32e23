"""GPT with the kernels: the LM head's alone, or all of them.

Shape suffixes: B batch, T sequence, N = B x T tokens, C channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gptmill.config.run import ActivationCheckpointing
from gptmill.models.fused.fp8_layers import find_head_format
from gptmill.models.fused.fused_block import FusedBlock
from gptmill.models.fused.fused_mlp import FusedMlp
from gptmill.models.fused.pending_residual import PendingResidual, add_and_normalise, to_autocast_dtype
from gptmill.models.gpt import GPT
from gptmill.models.kernels.linear_cross_entropy import linear_cross_entropy
from gptmill.models.losses import LossConfig, LossSums, sum_per_domain


class FusedHeadGPT(GPT):
    """The plain blocks, with a fused linear cross-entropy: LM head, loss and their gradients in one op."""

    def _compute_loss(
        self, x_BTC: Tensor, targets_N: Tensor, config: LossConfig, domains_N: Tensor | None = None
    ) -> LossSums:
        if not config.is_plain or self.config.logit_softcap is not None:
            return super()._compute_loss(x_BTC, targets_N, config, domains_N)
        x_NC = self._normalise(x_BTC).flatten(0, 1)
        total, losses_N = linear_cross_entropy(
            x_NC, self.head_weight, targets_N, config.chunk_tokens, find_head_format(self), self.softmax_size
        )
        return LossSums(total, total, sum_per_domain(losses_N, config.num_domains, domains_N))


class FusedGPT(FusedHeadGPT):
    """Fused blocks too. What they hand on is a pending residual; see there."""

    block_class = FusedBlock

    def set_activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        super().set_activation_checkpointing(mode)
        for module in self.modules():
            if isinstance(module, FusedMlp):
                # Selective checkpointing keeps the results of GEMMs: both of one with GELU in its epilogue.
                module.allows_epilogue = mode != "selective"

    def isolate_blocks(self) -> None:
        for block in self.list_blocks():
            assert isinstance(block, FusedBlock)
            block.copies_bias = True

    def _embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """The residual stream is in autocast's dtype: half the bytes of fp32 for every pass over it."""
        x_BTC = to_autocast_dtype(self._sum_embeddings(tokens_BT, positions))
        return self.dropout(x_BTC)  # type: ignore[no-any-return]

    def _fork(self, x: Any) -> Any:
        return x  # every consumer of a pending residual adds it up for itself

    def _normalise(self, x: Tensor | PendingResidual) -> Tensor:
        pending = x if isinstance(x, PendingResidual) else PendingResidual(x)
        return add_and_normalise(self.final_norm, pending)[1].x_BTC
