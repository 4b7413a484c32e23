"""Keys and values of the tokens seen so far, so that generation does not compute them again.

The room is that of a whole context from the start. A shape that never changes is what a compiled model needs; one
that is not compiled is shown the filled part only.

Shape suffixes: B batch, H heads of keys and values, T time, S places, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.config.model import ModelConfig


class LayerKVCache(NamedTuple):
    """One layer's keys and values, by place."""

    keys_BHSD: Tensor
    values_BHSD: Tensor

    def put(self, k_BHTD: Tensor, v_BHTD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Puts them at their places, and returns those of all places."""
        self.keys_BHSD.index_copy_(2, positions_T, k_BHTD.to(self.keys_BHSD.dtype))
        self.values_BHSD.index_copy_(2, positions_T, v_BHTD.to(self.values_BHSD.dtype))
        return self.keys_BHSD.to(k_BHTD.dtype), self.values_BHSD.to(v_BHTD.dtype)

    def show(self, num_places: int) -> LayerKVCache:
        """The first places, in the same memory."""
        return LayerKVCache(self.keys_BHSD[:, :, :num_places], self.values_BHSD[:, :, :num_places])


class KVCache:
    """The caches of all layers, and how many tokens they hold."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device) -> None:
        # Zeros, not whatever was there: what is hidden is multiplied by 0, and 0 times infinity is not 0.
        shape = (batch_size, config.kv_heads, config.context_length, config.head_width)
        self.layers = [
            LayerKVCache(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
            for _ in range(config.num_layers)
        ]
        self.length = 0

    @property
    def room(self) -> int:
        """Tokens that it can hold in all."""
        return self.layers[0].keys_BHSD.shape[2]

    def extend(self, num_tokens: int) -> tuple[Tensor, list[LayerKVCache]]:
        """Makes place for so many more; returns their positions_T and the layers as far as they are filled then."""
        start, self.length = self.length, self.length + num_tokens
        assert self.length <= self.room, "the cache is full"
        positions_T = torch.arange(start, self.length, device=self.layers[0].keys_BHSD.device)
        return positions_T, [layer.show(self.length) for layer in self.layers]


def build_kv_cache(config: ModelConfig, batch_size: int, device: torch.device) -> KVCache:
    """Empty ones."""
    return KVCache(config, batch_size, device)
