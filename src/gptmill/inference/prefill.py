"""Prefill: the prompts' keys and values, before the first token is decoded.

Prompts of unequal length are padded at their ends. What padding leaves in the KV cache lies at positions that are
overwritten before any token attends to them.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.gpt import GPT, CompilePart
from gptmill.models.kv_cache import LayerKVCache

PREFILL_CHUNK = 64  # prompt tokens per forward pass of a compiled model


def prefill(model: GPT, prompts: Sequence[Tensor], layers: Sequence[LayerKVCache]) -> None:
    """Fills the KV caches with all tokens of each prompt but the last, which the first decode step takes."""
    tokens_BT = pad_prompts(prompts)
    num_tokens = tokens_BT.shape[1]
    if num_tokens:
        positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        model.fill_cache(tokens_BT, positions_T, [layer.view(num_tokens) for layer in layers])


def prefill_in_chunks(
    model: GPT, prompts: Sequence[Tensor], layers: Sequence[LayerKVCache], compile_part: CompilePart
) -> None:
    """The same with one static shape, so that no length triggers a recompilation."""
    tokens_BT = pad_prompts(prompts)
    num_tokens, capacity = tokens_BT.shape[1], layers[0].keys_BHSD.shape[2]
    size = min(PREFILL_CHUNK, capacity)
    chunk_T = torch.arange(size, device=tokens_BT.device)
    padded_BT = F.pad(tokens_BT, (0, max(0, capacity - num_tokens)))
    for first in range(0, num_tokens, size):
        # A chunk that would reach past the context starts earlier and recomputes some tokens.
        first = min(first, capacity - size)
        model.fill_cache(padded_BT[:, first : first + size].contiguous(), first + chunk_T, layers, compile_part)


def pad_prompts(prompts: Sequence[Tensor]) -> Tensor:
    """The prompts without their last tokens, padded to the longest."""
    longest = max(len(prompt_T) for prompt_T in prompts) - 1
    return torch.stack([F.pad(prompt_T[:-1], (0, longest + 1 - len(prompt_T))) for prompt_T in prompts])
