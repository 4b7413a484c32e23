"""Updates that keep zeros: a weight of the blocks that is zero before an update is zero after it (--keep_zeros).

The rule needs no mask beside the weights, so that a resumed run follows it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gptmill.models.compressible import list_matrices


@contextmanager
def keep_zeros(model: nn.Module) -> Iterator[None]:
    """Clears the gradients of zeros, so that they count neither for clipping nor for momentum, and then the zeros."""
    weights = list(list_matrices(model).values())
    kept = [weight.detach() != 0 for weight in weights]
    with torch.no_grad():
        for weight, mask in zip(weights, kept, strict=True):
            if weight.grad is not None:
                weight.grad.mul_(mask)
        yield
        # Muon and 8-bit optimizers move a weight that has no gradient.
        torch._foreach_mul_(weights, kept)
