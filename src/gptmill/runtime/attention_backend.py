"""Selects the backend of scaled_dot_product_attention for this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptmill.config.run import AttentionBackend


def set_attention_backend(backend: AttentionBackend) -> None:
    """Enables one fused backend, or all. The math backend stays enabled for inputs that the others do not support."""
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(backend in ("auto", "cudnn"))
    cuda.enable_flash_sdp(backend in ("auto", "flash"))
    cuda.enable_mem_efficient_sdp(backend in ("auto", "efficient"))


@contextmanager
def without_cudnn_plans() -> Iterator[None]:
    """Leaves out cuDNN where the other fused backends are enabled: it plans for tens of milliseconds per new shape."""
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(was_enabled and not (cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()))
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)
