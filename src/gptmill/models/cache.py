"""Keys and values of the tokens seen so far, so that generation does not compute them again."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmill.config.run import ModelConfig


class LayerCache:
    """Room for one layer's keys and values over a whole context."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device) -> None:
        shape = (2, batch_size, config.num_heads, config.context_length, config.embd_size // config.num_heads)
        self.kv_2BHSD = torch.empty(shape, device=device)
        self.length = 0

    def extend(self, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends, and returns everything held."""
        end = self.length + k_BHTD.shape[2]
        assert end <= self.kv_2BHSD.shape[3], "the cache is full"
        self.kv_2BHSD[0, :, :, self.length : end] = k_BHTD
        self.kv_2BHSD[1, :, :, self.length : end] = v_BHTD
        self.length = end
        keys_BHSD, values_BHSD = self.kv_2BHSD[:, :, :, :end].to(k_BHTD.dtype).unbind(0)
        return keys_BHSD, values_BHSD


def build_caches(config: ModelConfig, batch_size: int, device: torch.device) -> list[LayerCache]:
    """One empty cache per layer."""
    return [LayerCache(config, batch_size, device) for _ in range(config.num_layers)]
