"""The KV cache: keys and values of the tokens seen so far, so that generation does not compute them again.

It has the capacity of a whole context from the start: a compiled model needs a shape that never changes. An eager
model is given a view of the filled part only.

Shape suffixes: B batch, H key/value heads, T sequence, S positions of the cache, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.config.model import ModelConfig


class LayerKVCache(NamedTuple):
    """One layer's keys and values, by position."""

    keys_BHSD: Tensor
    values_BHSD: Tensor

    def update(self, k_BHTD: Tensor, v_BHTD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Writes keys and values at their positions, and returns those of all positions."""
        self.keys_BHSD.index_copy_(2, positions_T, k_BHTD.to(self.keys_BHSD.dtype))
        self.values_BHSD.index_copy_(2, positions_T, v_BHTD.to(self.values_BHSD.dtype))
        return self.keys_BHSD.to(k_BHTD.dtype), self.values_BHSD.to(v_BHTD.dtype)

    def view(self, num_positions: int) -> LayerKVCache:
        """The first positions, in the same memory."""
        return LayerKVCache(self.keys_BHSD[:, :, :num_positions], self.values_BHSD[:, :, :num_positions])


class KVCache:
    """The caches of all layers, and how many tokens they hold."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device) -> None:
        # Zeros, not empty memory: masked values are multiplied by 0, and 0 times infinity is NaN.
        shape = (batch_size, config.kv_heads, config.context_length, config.head_width)
        self.layers = [
            LayerKVCache(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
            for _ in range(config.num_layers)
        ]
        self.length = 0

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self.layers[0].keys_BHSD.shape[2]

    def extend(self, num_tokens: int) -> tuple[Tensor, list[LayerKVCache]]:
        """Reserves positions for more tokens; returns these positions_T, and views of the layers up to the last."""
        start, self.length = self.length, self.length + num_tokens
        assert self.length <= self.capacity, "the KV cache is full"
        positions_T = torch.arange(start, self.length, device=self.layers[0].keys_BHSD.device)
        return positions_T, [layer.view(self.length) for layer in self.layers]


def build_kv_cache(config: ModelConfig, batch_size: int, device: torch.device) -> KVCache:
    """An empty cache for a model."""
    return KVCache(config, batch_size, device)
