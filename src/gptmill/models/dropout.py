"""What dropout leaves of a tensor, drawn without the tensor."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gptmill::draw_kept", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draw_kept(like: Tensor, p: float) -> Tensor:
    """For each number of a tensor whether it is kept, which has a chance of 1 - p.

    An operation, since torch's own kernel draws four numbers in the time that torch.compile's needs for one.
    """
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)


@draw_kept.register_fake
def _(like: Tensor, p: float) -> Tensor:  # noqa: ARG001
    return like.new_empty(like.shape, dtype=torch.bool)
