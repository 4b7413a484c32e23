"""The mask of dropout, drawn apart from the tensor that it is applied to.

A kernel that applies the mask together with other operations (`add_norm`) needs it in the forward and in the backward
pass; as a tensor of booleans it costs one byte per element.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gptmill::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_mask(like: Tensor, p: float) -> Tensor:
    """Whether dropout keeps each element: True with probability 1 - p, on GPUs to the nearest multiple of 2^-16."""
    if like.device.type != "cuda":
        return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)
    from gptmill.models.kernels.dropout_mask_triton import run_dropout_mask

    # A seed on the device, so that every replay of a CUDA graph draws another mask.
    seed = torch.randint(2**63 - 1, (), device=like.device)
    return run_dropout_mask(like.numel(), p, seed).view(like.shape)


@dropout_mask.register_fake
def _(like: Tensor, p: float) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)
