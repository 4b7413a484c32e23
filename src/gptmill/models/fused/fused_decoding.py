"""A decode step by kernels: five per block, for one new token of each sequence.

Norm and QKV projection; attention with the KV cache; projection and residual; norm, up projection and activation; down
projection and residual. The residual stream stays in fp32. All memory is allocated once, so that a CUDA graph can
capture the step.

Shape suffixes: B sequences, C channels, E packed queries, keys and values, H heads, D head dimension, F hidden width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptmill.config.model import Gelu, SoftmaxAttention, SwiGlu
from gptmill.models.feed_forward import GatedMlp, Mlp
from gptmill.models.gpt import GPT
from gptmill.models.kernels.decode_attention import DecodeAttention, QkNorm
from gptmill.models.kernels.decode_embedding import embed_tokens
from gptmill.models.kernels.decode_linear import Activation, Norm, decode_linear
from gptmill.models.kernels.support import has_kernels
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.rotary import make_rope

MAX_BATCH = 64
MAX_WIDTH = 8192
MIN_HEAD_WIDTH = 16


def can_fuse_decoding(model: GPT, batch_size: int) -> bool:
    """Whether the kernels know all parts of the model, and its device can run them."""
    config = model.config
    linears = [layer for block in model.blocks for layer in _list_linears(block)]
    has_known_parts = (
        not config.own_parts
        and isinstance(config.attention, SoftmaxAttention)
        and config.value_embeddings == 0
        and all(type(layer) is nn.Linear for layer in linears)
    )
    is_power_of_2 = config.head_width & (config.head_width - 1) == 0
    has_known_sizes = is_power_of_2 and config.head_width >= MIN_HEAD_WIDTH and config.embd_size <= MAX_WIDTH
    has_one_dtype = len({weight.dtype for weight in model.parameters()}) == 1
    fits = has_known_sizes and has_one_dtype and batch_size <= MAX_BATCH
    return fits and has_known_parts and has_kernels(model.token_embedding.weight.device)


class FusedDecoder:
    """The memory of a decode step for `batch_size` sequences, of which the KV cache has `capacity` positions."""

    def __init__(self, model: GPT, batch_size: int, capacity: int, vocab_size: int) -> None:
        config, weight = model.config, model.token_embedding.weight
        heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_width

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(batch_size, *shape, device=weight.device, dtype=dtype)

        self._model = model
        self._x_BC = zeros(config.embd_size, dtype=torch.float32)
        self._qkv_BE = zeros((heads + 2 * kv_heads) * width)
        self._gathered_BHD = zeros(heads, width)
        self._hidden_BF = zeros(config.hidden_size)
        self._logits_BV = zeros(vocab_size, dtype=torch.float32)
        self._attention = DecodeAttention(batch_size, heads, kv_heads, width, weight.device)
        self._rope_SD = make_rope(torch.arange(capacity, device=weight.device), config)
        self._activation: Activation = "gelu" if isinstance(config.feed_forward, Gelu) else "relu2"
        if isinstance(config.feed_forward, SwiGlu):
            self._activation = "swiglu"

    def step(self, tokens_B: Tensor, positions_B: Tensor, layers: Sequence[LayerKVCache]) -> Tensor:
        """The next tokens' logits, in memory that the next step overwrites. Adds the tokens to the KV caches."""
        model, x_BC = self._model, self._x_BC
        positions = None if model.position_embedding is None else model.position_embedding.weight
        embed_tokens(tokens_B, positions_B, model.token_embedding.weight, positions, x_BC)
        for block, window, cache in zip(model.blocks, model.windows, layers, strict=True):
            qkv, proj, up, down = _list_linears(block)
            decode_linear(x_BC, qkv.weight, qkv.bias, self._qkv_BE, norm=_read_norm(block.attention_norm))
            self._attention.run(
                self._qkv_BE,
                *cache,
                positions_B,
                self._gathered_BHD,
                window=window,
                rope_SD=self._rope_SD,
                qk_norm=_read_qk_norm(block.attention),
            )
            decode_linear(self._gathered_BHD.flatten(1), proj.weight, proj.bias, x_BC, residual_BN=x_BC)
            mlp_norm = _read_norm(block.mlp_norm)
            decode_linear(x_BC, up.weight, up.bias, self._hidden_BF, norm=mlp_norm, activation=self._activation)
            decode_linear(self._hidden_BF, down.weight, down.bias, x_BC, residual_BN=x_BC)
        head_VC = model.head_weight[: self._logits_BV.shape[1]]  # without the rows that pad the vocabulary
        decode_linear(x_BC, head_VC, None, self._logits_BV, norm=_read_norm(model.final_norm))
        if (cap := model.config.logit_softcap) is None:
            return self._logits_BV
        return cap * torch.tanh(self._logits_BV / cap)


def _list_linears(block: Any) -> list[Any]:
    """The block's linear layers in their order; none for other feed-forward parts than those of the kernels."""
    if type(block.mlp) not in (Mlp, GatedMlp):
        return [block.mlp]
    up = block.mlp.gate_up if isinstance(block.mlp, GatedMlp) else block.mlp.up
    return [block.attention.qkv, block.attention.proj, up, block.mlp.proj]


def _read_norm(norm: Any) -> Norm:
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


def _read_qk_norm(attention: Any) -> QkNorm | None:
    if attention.query_norm is None:
        return None
    return attention.query_norm.weight, attention.key_norm.weight, attention.query_norm.eps
