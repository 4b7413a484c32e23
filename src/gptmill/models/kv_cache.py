"""The KV cache: keys and values of the tokens seen so far, so that generation does not compute them again.

Its memory is reserved once, since compiled code and CUDA graphs need tensors that stay where they are. A view of its
first positions spares attention the empty ones.

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

    def update(self, k_BHTD: Tensor, v_BHTD: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Writes keys and values at their positions, and returns those of all positions.

        The positions are one row (T) for all texts, or a row for each (B, T).
        """
        for cache_BHSD, new_BHTD in zip(self, (k_BHTD, v_BHTD), strict=True):
            if positions.dim() == 1:
                cache_BHSD.index_copy_(2, positions, new_BHTD.to(cache_BHSD.dtype))
            else:
                rows_B1 = torch.arange(len(positions), device=positions.device)[:, None]
                cache_BHSD[rows_B1, :, positions] = new_BHTD.transpose(1, 2).to(cache_BHSD.dtype)
        return self.keys_BHSD.to(k_BHTD.dtype), self.values_BHSD.to(v_BHTD.dtype)

    def view(self, num_positions: int) -> LayerKVCache:
        """The first positions, in the same memory."""
        return LayerKVCache(self.keys_BHSD[:, :, :num_positions], self.values_BHSD[:, :, :num_positions])

    def row(self, index: int) -> LayerKVCache:
        """One text of the batch, in the same memory."""
        return LayerKVCache(self.keys_BHSD[index : index + 1], self.values_BHSD[index : index + 1])


class KVCache:
    """The caches of all layers, and how many tokens they hold where all texts have the same length."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        device: torch.device,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # Zeros, not empty memory: masked values are multiplied by 0, and 0 times infinity is NaN.
        shape = (batch_size, config.kv_heads, capacity or config.context_length, config.head_width)
        self.layers = [
            LayerKVCache(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for _ in range(config.num_layers)
        ]
        self.length = 0

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self.layers[0].keys_BHSD.shape[2]

    def view(self, num_positions: int) -> list[LayerKVCache]:
        """The first positions of all layers."""
        return [layer.view(num_positions) for layer in self.layers]

    def extend(self, num_tokens: int) -> tuple[Tensor, list[LayerKVCache]]:
        """Reserves positions for more tokens; returns these positions_T, and views of the layers up to the last."""
        start, self.length = self.length, self.length + num_tokens
        assert self.length <= self.capacity, "the KV cache is full"
        positions_T = torch.arange(start, self.length, device=self.layers[0].keys_BHSD.device)
        return positions_T, self.view(self.length)


def build_kv_cache(
    config: ModelConfig,
    batch_size: int,
    device: torch.device,
    capacity: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    """An empty cache for a model, by default of a whole context."""
    return KVCache(config, batch_size, device, capacity, dtype)
