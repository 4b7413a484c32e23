"""Selects the backend of scaled_dot_product_attention for this process."""

from __future__ import annotations

import torch

from gptmill.config.run import AttentionBackend


def set_attention_backend(backend: AttentionBackend) -> None:
    """Enables one fused backend, or all. The math backend stays enabled for inputs that the others do not support."""
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(backend in ("auto", "cudnn"))
    cuda.enable_flash_sdp(backend in ("auto", "flash"))
    cuda.enable_mem_efficient_sdp(backend in ("auto", "efficient"))
