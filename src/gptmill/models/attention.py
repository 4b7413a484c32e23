"""Causal self-attention, with all that a config may ask of it.

Shape suffixes: B batch, T time, S time seen, C width, H heads, K heads of keys and values, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import ModelConfig
from gptmill.models.fp8 import Fp8Linear, apply_layer, wants_fp8_input
from gptmill.models.kernels.qkv_projection import project_qkv
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.masks import Mask, flex_attend
from gptmill.models.norms import build_head_norm
from gptmill.models.rotary import Rotation, rotate
from gptmill.models.stream import Branch, Normed, apply_last


class BlockContext(NamedTuple):
    """What a block needs to know of the tokens beside the residual stream."""

    rotation: Rotation | None = None
    mask: Mask = Mask()
    value_embedding_BTW: Tensor | None = None
    """The tokens' own values, W = K x D wide."""
    positions_T: Tensor | None = None
    """The tokens' places, needed only where there is a cache."""
    counts_BT: Tensor | None = None
    """Which tokens have a target; the others only pad."""


def find_value_table(config: ModelConfig, layer: int) -> int | None:
    """Which value embedding serves a layer: the first and the last share one, the second and the last but one…"""
    table = min(layer, config.num_layers - 1 - layer)
    return table if 0 <= table < config.value_embeddings else None


class Attention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values, in this order."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.fused = False
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

    @property
    def wants_fp8_input(self) -> bool:
        """Whether what comes in is wanted in fp8 too."""
        return wants_fp8_input(self.qkv)

    def forward(self, normed: Normed, context: BlockContext, cache: LayerKVCache | None = None) -> Branch:
        """Attends to what the mask lets through."""
        # Heads stay beside each other in memory, as the layers before and after want them: attention can read that.
        q_BTHD, k_BTKD, v_BTKD = self._project(normed, context.rotation)
        if self.value_gate is not None:
            v_BTKD = v_BTKD + self._weigh_values(context).to(v_BTKD.dtype)
        q_BHTD, k_BKSD, v_BKSD = (part.transpose(1, 2) for part in (q_BTHD, k_BTKD, v_BTKD))
        if cache is not None:
            assert context.positions_T is not None, "tokens for a cache must say their places"
            k_BKSD, v_BKSD = cache.put(k_BKSD, v_BKSD, context.positions_T)
        y_BHTD = self._attend(q_BHTD, k_BKSD, v_BKSD, context.mask)
        return apply_last(self.proj, y_BHTD.transpose(1, 2).flatten(2), self.fused)

    def _project(self, normed: Normed, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the former two normed and turned."""
        is_transposed = self.query_norm is None  # by the kernel, which does no norms
        is_for_kernel = self.kv_heads == self.num_heads and (
            self.qkv.bias is not None or (is_transposed and rotation is not None)
        )
        if self.fused and is_for_kernel and (self.wants_fp8_input or not isinstance(self.qkv, Fp8Linear)):
            heads = project_qkv(normed, self.qkv, self.num_heads, rotation if is_transposed else None)
            if is_transposed:
                return heads
            q_BTHD, k_BTKD, v_BTKD = heads
        else:
            qkv_BTHD = apply_layer(self.qkv, *normed).unflatten(-1, (-1, self.head_width))
            q_BTHD, k_BTKD, v_BTKD = qkv_BTHD.split((self.num_heads, self.kv_heads, self.kv_heads), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHD = self.query_norm(q_BTHD.float()).to(v_BTKD.dtype)
            k_BTKD = self.key_norm(k_BTKD.float()).to(v_BTKD.dtype)
        if rotation is not None:
            q_BTHD, k_BTKD = rotate(q_BTHD, rotation), rotate(k_BTKD, rotation)
        return q_BTHD, k_BTKD, v_BTKD

    def _weigh_values(self, context: BlockContext) -> Tensor:
        """The tokens' own values, as much of them as each head has learnt to want."""
        assert self.value_gate is not None
        assert context.value_embedding_BTW is not None
        B, T, _ = context.value_embedding_BTW.shape
        return self.value_gate[:, None] * context.value_embedding_BTW.view(B, T, self.kv_heads, self.head_width)

    def _attend(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Mask) -> Tensor:
        is_shared = self.kv_heads != self.num_heads
        if mask.blocks is not None:
            return flex_attend(q_BHTD, k_BKSD, v_BKSD, mask.blocks, shared=is_shared)
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask.dense_B1TS,
            is_causal=mask.dense_B1TS is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=is_shared,
        )
