"""Updates that keep zeros: a weight of the blocks that is zero before an update is zero after it (--keep_zeros).

The rule needs no mask beside the weights, so that a resumed run follows it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gptmill.models.compressible import list_matrices
from gptmill.runtime.parallel.local_shards import to_local


@contextmanager
def keep_zeros(model: nn.Module) -> Iterator[None]:
    """Clears the gradients of zeros, so that they count neither for clipping nor for momentum, and then the zeros."""
    matrices = list(list_matrices(model).values())
    weights = [to_local(matrix) for matrix in matrices]
    kept = [weight != 0 for weight in weights]
    with torch.no_grad():
        for matrix, mask in zip(matrices, kept, strict=True):
            if matrix.grad is not None:
                to_local(matrix.grad).mul_(mask)
        yield
        # Muon and 8-bit optimizers move a weight that has no gradient.
        torch._foreach_mul_(weights, kept)
