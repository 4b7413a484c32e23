"""Attention of one new token per sequence against its KV cache.

Shape suffixes: B sequences, H query heads, K key/value heads, S positions, D head dimension, E = (H + 2 K) x D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.rotary import CosSin, apply_rope

PROGRAMS = 264  # to fill a GPU: two for each multiprocessor of an H100
MAX_SPLITS = 16  # of a sequence

QkNorm = tuple[Tensor, Tensor, float]
"""The weights for queries and keys, and epsilon."""


class DecodeAttention:
    """Attention for `batch_size` sequences, with the memory through which programs exchange results."""

    def __init__(self, batch_size: int, heads: int, kv_heads: int, width: int, device: torch.device) -> None:
        programs = PROGRAMS // (batch_size * kv_heads)
        self._splits = min(MAX_SPLITS, max(1, 1 << (programs.bit_length() - 1))) if programs else 1
        self._partial = torch.zeros(batch_size * heads * self._splits * (width + 2), device=device)
        self._counters = torch.zeros(batch_size * kv_heads, dtype=torch.int32, device=device)

    def run(
        self,
        qkv_BE: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        positions_B: Tensor,
        result_BHD: Tensor,
        *,
        window: int | None = None,
        rope_SD: CosSin | None = None,
        qk_norm: QkNorm | None = None,
    ) -> None:
        """Appends the new tokens' keys and values at `positions_B`, and writes what their queries gather.

        `rope_SD` holds the cosines and sines of all positions.
        """
        tensors = (qkv_BE, keys_BKSD, values_BKSD, positions_B, result_BHD)
        if qkv_BE.device.type != "cuda":
            decode_attention_reference(*tensors, window, rope_SD, qk_norm)
            return
        from gptmill.models.kernels.decode_attention_triton import run_decode_attention

        run_decode_attention(*tensors, window, rope_SD, qk_norm, self._partial, self._counters, self._splits)


def decode_attention_reference(
    qkv_BE: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    positions_B: Tensor,
    result_BHD: Tensor,
    window: int | None,
    rope_SD: CosSin | None,
    qk_norm: QkNorm | None,
) -> None:
    """Reference implementation."""
    (_, kv_heads, capacity, width), heads = keys_BKSD.shape, result_BHD.shape[1]
    qkv_BHD = qkv_BE.float().unflatten(-1, (-1, width))
    q_BHD, k_BKD, v_BKD = qkv_BHD.split((heads, kv_heads, kv_heads), dim=1)
    if qk_norm is not None:
        query_weight, key_weight, eps = qk_norm
        q_BHD = F.rms_norm(q_BHD, (width,), query_weight.float(), eps)
        k_BKD = F.rms_norm(k_BKD, (width,), key_weight.float(), eps)
    if rope_SD is not None:
        cos_sin = (rope_SD[0][positions_B], rope_SD[1][positions_B])
        q_BHD, k_BKD = apply_rope(q_BHD[None], cos_sin)[0], apply_rope(k_BKD[None], cos_sin)[0]
    rows_B = torch.arange(len(positions_B), device=positions_B.device)
    keys_BKSD[rows_B, :, positions_B] = k_BKD.to(keys_BKSD.dtype)
    values_BKSD[rows_B, :, positions_B] = v_BKD.to(values_BKSD.dtype)
    places_S = torch.arange(capacity, device=positions_B.device)
    first_B = positions_B - (capacity if window is None else window)
    is_seen_BS = (places_S <= positions_B[:, None]) & (places_S > first_B[:, None])
    result_BHD.copy_(
        F.scaled_dot_product_attention(
            q_BHD[:, :, None],
            keys_BKSD.float(),
            values_BKSD.float(),
            attn_mask=is_seen_BS[:, None, None],
            enable_gqa=heads != kv_heads,
        )[:, :, 0]
    )
