"""What dropout leaves of a tensor, drawn without the tensor."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gptmill::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_mask(like: Tensor, p: float) -> Tensor:
    """For each number of a tensor whether it is kept, which has a chance of 1 - p, up to a 65,536th."""
    if like.device.type != "cuda":
        return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)
    from gptmill.models.kernels.dropout_mask_triton import run_dropout_mask

    # On the device, so that what is recorded as a CUDA graph draws anew each time.
    seed = torch.randint(2**63 - 1, (), device=like.device)
    return run_dropout_mask(like.numel(), p, seed).view(like.shape)


@dropout_mask.register_fake
def _(like: Tensor, p: float) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)
