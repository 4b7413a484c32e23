"""Pruning by magnitude: which weights to keep, as a mask of the same shape.

Shape suffixes: O outputs, I inputs; experts have one dimension more in front.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT, OF = 2, 4  # 2:4, the pattern of NVIDIA's sparse tensor cores


def make_magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keeps the largest weights of a matrix; `sparsity` is the share of the others (Han et al. 2015)."""
    magnitudes = weight.abs().flatten()
    dropped = round(sparsity * magnitudes.numel())
    mask = torch.ones_like(magnitudes, dtype=torch.bool)
    mask[magnitudes.argsort(stable=True)[:dropped]] = False
    return mask.view_as(weight)


def make_2_of_4_mask(weight: Tensor) -> Tensor:
    """Keeps the two largest of every four weights of consecutive inputs (Mishra et al. 2021)."""
    groups = weight.abs().unflatten(-1, (-1, OF))
    dropped = groups.argsort(dim=-1, stable=True)[..., : OF - KEPT]
    return torch.ones_like(groups, dtype=torch.bool).scatter_(-1, dropped, value=False).flatten(-2)
