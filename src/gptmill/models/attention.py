"""Causal self-attention: multi-head or grouped-query, with RoPE, QK-norm, sliding windows and value embeddings where
the config asks for them.

Shape suffixes: B batch, T sequence, S positions attended to, C channels, H query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import ModelConfig, SoftmaxAttention
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.masks import Mask, flex_attend
from gptmill.models.norms import build_head_norm
from gptmill.models.rotary import CosSin, apply_rope


class BlockContext(NamedTuple):
    """What a block needs to know about the tokens beside their hidden states."""

    rope: CosSin | None = None
    mask: Mask = Mask()
    value_embedding_BTW: Tensor | None = None
    """The tokens' value embeddings, W = K x D wide."""
    positions_T: Tensor | None = None
    """Where a KV cache keeps the tokens: their positions, (T), or (B, T) where they differ by text."""
    counts_BT: Tensor | None = None
    """Which tokens have a target; the others are padding."""
    share: RowShare | None = None
    """The part of each row that this process computes, where it is not all of it."""


class RowShare(Protocol):
    """Some positions of every row, in ascending chunks of equal length, and a way to what the others hold."""

    def list_positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of this share in a row of that length."""
        ...

    def list_ends(self, length: int) -> list[int]:
        """One past the last position of each chunk of this share."""
        ...

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All positions along `dim`, in their order, from this share of them. Autograd knows the way back."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all shares; each gets the gradient of its own summand."""
        ...


def find_value_table(config: ModelConfig, layer: int) -> int | None:
    """Which value embedding a layer adds: the first and the last layer share one, the second and the second to last…"""
    table = min(layer, config.num_layers - 1 - layer)
    return table if 0 <= table < config.value_embeddings else None


class Attention(nn.Module):
    """Attention with one packed projection for queries, keys and values, in this order."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_width = config.num_heads, config.kv_heads, config.head_width
        self.dropout = config.dropout
        width = config.num_heads * config.head_width
        kv_width = config.kv_heads * config.head_width
        self.qkv = nn.Linear(config.embd_size, width + 2 * kv_width, bias=config.bias)
        self.packed_splits = {"qkv.weight": (width, kv_width, kv_width)}
        self.query_norm = build_head_norm(config) if config.qk_norm else None
        self.key_norm = build_head_norm(config) if config.qk_norm else None
        has_values = find_value_table(config, layer) is not None
        self.value_gate = nn.Parameter(torch.empty(config.kv_heads)) if has_values else None
        self.proj = nn.Linear(width, config.embd_size, bias=config.bias)

    def forward(self, x_BTC: Tensor, context: BlockContext, cache: LayerKVCache | None = None) -> Tensor:
        """What each token gathers from the tokens that its mask lets it see."""
        y_BTE = self.attend(*self.project_qkv(x_BTC, context.rope), context, cache)
        return self.proj(y_BTE)  # type: ignore[no-any-return]

    def project_qkv(self, x_BTC: Tensor, rope: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with QK-norm and RoPE applied."""
        q_BTHD, k_BTKD, v_BTKD = self.split_heads(self.qkv(x_BTC))
        q_BTHD, k_BTKD = self.normalise_heads(q_BTHD, k_BTKD)
        if rope is not None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        return q_BTHD, k_BTKD, v_BTKD

    def split_heads(self, qkv_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the packed projection's result."""
        qkv_BTHD = qkv_BTE.unflatten(-1, (-1, self.head_width))
        q_BTHD, k_BTKD, v_BTKD = qkv_BTHD.split((self.num_heads, self.kv_heads, self.kv_heads), dim=2)
        return q_BTHD, k_BTKD, v_BTKD

    def normalise_heads(self, q_BTHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """QK-norm, in fp32."""
        if self.query_norm is None or self.key_norm is None:
            return q_BTHD, k_BTKD
        return self.query_norm(q_BTHD.float()).to(q_BTHD.dtype), self.key_norm(k_BTKD.float()).to(k_BTKD.dtype)

    def attend(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, context: BlockContext, cache: LayerKVCache | None
    ) -> Tensor:
        """What attention computes, all heads' results side by side."""
        if self.value_gate is not None:
            v_BTKD = v_BTKD + self._gate_value_embedding(context).to(v_BTKD.dtype)
        # Transposed views: heads stay side by side in memory, as the projections before and after want them.
        q_BHTD, k_BKSD, v_BKSD = (part.transpose(1, 2) for part in (q_BTHD, k_BTKD, v_BTKD))
        if cache is not None:
            assert context.positions_T is not None, "tokens for a KV cache need their positions"
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD, context.positions_T)
        y_BHTD = self.compute_attention(q_BHTD, k_BKSD, v_BKSD, context)
        return y_BHTD.transpose(1, 2).flatten(2)

    def compute_attention(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, context: BlockContext) -> Tensor:
        """Scaled dot-product attention under the context's mask."""
        is_grouped, mask = self.kv_heads != self.num_heads, context.mask
        if mask.block_mask is not None:
            return flex_attend(q_BHTD, k_BKSD, v_BKSD, mask.block_mask, is_grouped=is_grouped)
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask.dense_B1TS,
            is_causal=mask.is_causal and mask.dense_B1TS is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=is_grouped,
        )

    def _gate_value_embedding(self, context: BlockContext) -> Tensor:
        """The tokens' value embeddings, weighted by a learned gate per head."""
        assert self.value_gate is not None
        assert context.value_embedding_BTW is not None
        B, T, _ = context.value_embedding_BTW.shape
        return self.value_gate[:, None] * context.value_embedding_BTW.view(B, T, self.kv_heads, self.head_width)


ATTENTIONS: dict[type, type[nn.Module]] = {SoftmaxAttention: Attention}
"""The module of each variant of `ModelConfig.attention`."""
