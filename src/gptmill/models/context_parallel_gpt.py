"""GPT that computes a share of every row's positions; other processes compute the others (context parallelism).

Only the loss is computed so, by `forward`; hidden states, logits and generation are those of whole rows.

Shape suffixes: B batch, T sequence, S all positions of a row, N tokens, H query heads, K key/value heads, D head
dimension, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import SoftmaxAttention
from gptmill.models.attention import Attention, BlockContext, RowShare
from gptmill.models.block import Block
from gptmill.models.gpt import GPT
from gptmill.models.language_model import Losses
from gptmill.models.losses import LossConfig, LossSums
from gptmill.models.masks import can_use_flex_attention, make_mask
from gptmill.models.rotary import make_rope


class ContextParallelAttention(Attention):
    """Queries of the share's positions, and keys and values of all."""

    def compute_attention(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, context: BlockContext) -> Tensor:
        if context.share is None:
            return super().compute_attention(q_BHTD, k_BKSD, v_BKSD, context)
        k_BKSD, v_BKSD = context.share.gather(torch.stack([k_BKSD, v_BKSD]), dim=3).unbind()
        if context.mask.dense_B1TS is not None or context.mask.block_mask is not None:
            return super().compute_attention(q_BHTD, k_BKSD, v_BKSD, context)
        ends = context.share.list_ends(k_BKSD.shape[2])
        # A chunk of queries sees no key behind its own end; leaving those out halves the work.
        parts = [
            self._attend_causally(part_BHTD, k_BKSD[:, :, :end], v_BKSD[:, :, :end])
            for part_BHTD, end in zip(q_BHTD.chunk(len(ends), dim=2), ends, strict=True)
        ]
        return torch.cat(parts, dim=2)

    def _attend_causally(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Attention of the last positions: the last query sees all keys, the one before all but one."""
        is_square = q_BHTD.shape[2] == k_BKSD.shape[2]
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=None if is_square else _make_causal_mask(q_BHTD, k_BKSD),
            is_causal=is_square,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.num_heads,
        )


def _make_causal_mask(q_BHTD: Tensor, k_BKSD: Tensor) -> Tensor:
    T, S = q_BHTD.shape[2], k_BKSD.shape[2]
    if q_BHTD.device.type == "cuda":  # imported here: it brings torch's compiler along
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(T, S)  # which flash attention computes without a mask in memory
    return torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)


class ContextParallelBlock(Block):
    """The same parameters."""

    attention_classes: ClassVar[Mapping[type, type[nn.Module]]] = {SoftmaxAttention: ContextParallelAttention}


class ContextParallelGPT(GPT):
    """The same parameters. `forward` takes whole rows and returns the losses of whole rows, the same everywhere; a
    gradient is this share's summand of the whole."""

    block_class = ContextParallelBlock
    share: RowShare | None = None
    _is_shared = False

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None, domains_B: Tensor | None = None
    ) -> Losses:
        if self.share is None:
            return super().forward(tokens_BT, targets_BT, documents_BT, domains_B)
        self._is_shared = True
        try:
            losses = super().forward(tokens_BT, targets_BT, documents_BT, domains_B)
        finally:
            self._is_shared = False
        objective, cross_entropy = self.share.sum(losses.objective), self.share.sum(losses.cross_entropy)
        per_domain_G = None if losses.per_domain_G is None else self.share.sum(losses.per_domain_G)
        return Losses(objective, cross_entropy, per_domain_G, losses.experts_LE)

    def _make_contexts(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, counts_BT: Tensor | None
    ) -> dict[int | None, BlockContext]:
        if not self._is_shared:
            return super()._make_contexts(tokens_BT, documents_BT, counts_BT)
        positions_T = self._list_positions(tokens_BT)
        rope = make_rope(positions_T, self.config)
        flex = can_use_flex_attention(self.config, tokens_BT.device, training=self.training)
        return {
            window: BlockContext(
                rope, make_mask(window, tokens_BT, documents_BT, use_flex=flex, queries_T=positions_T), share=self.share
            )
            for window in self.list_masks()
        }

    def _embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        if not self._is_shared:
            return super()._embed(tokens_BT, positions)
        return super()._embed(self._take(tokens_BT), positions[..., self._list_positions(tokens_BT)])

    def _embed_values(self, tokens_BT: Tensor, layer: int) -> Tensor | None:
        return super()._embed_values(self._take(tokens_BT) if self._is_shared else tokens_BT, layer)

    def _compute_loss(
        self, x_BTC: Tensor, targets_N: Tensor, config: LossConfig, domains_N: Tensor | None = None
    ) -> LossSums:
        if self._is_shared:
            rows = len(x_BTC)
            targets_N = self._take(targets_N.unflatten(0, (rows, -1))).flatten()
            domains_N = None if domains_N is None else self._take(domains_N.unflatten(0, (rows, -1))).flatten()
        return super()._compute_loss(x_BTC, targets_N, config, domains_N)

    def _take(self, rows_BS: Tensor) -> Tensor:
        """This share of rows."""
        return rows_BS[:, self._list_positions(rows_BS)]

    def _list_positions(self, rows_BS: Tensor) -> Tensor:
        assert self.share is not None
        return self.share.list_positions(rows_BS.shape[1], rows_BS.device)


def share_rows(model: nn.Module, share: RowShare) -> None:
    """Makes the model compute this share of every row."""
    assert isinstance(model, ContextParallelGPT)
    model.share = share
