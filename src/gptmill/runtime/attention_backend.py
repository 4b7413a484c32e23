"""Which of PyTorch's implementations computes attention, in this process."""

from __future__ import annotations

import torch

from gptmill.config.run import AttentionBackend


def choose_attention(backend: AttentionBackend) -> None:
    """Leaves one implementation to choose from, or all. The plain formula stays: it serves what the others do not."""
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(backend in ("auto", "cudnn"))
    cuda.enable_flash_sdp(backend in ("auto", "flash"))
    cuda.enable_mem_efficient_sdp(backend in ("auto", "efficient"))
