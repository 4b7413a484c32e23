"""A matrix of bytes turned: fp8 is multiplied only along what lies side by side in memory."""

from __future__ import annotations

from torch import Tensor


def transpose_bytes(x_MN: Tensor) -> Tensor:
    """The transpose, as a matrix of its own."""
    assert x_MN.element_size() == 1, "only numbers of one byte"
    if x_MN.device.type != "cuda":
        return transpose_reference(x_MN)
    from gptmill.models.kernels.transpose_triton import run_transpose

    return run_transpose(x_MN.contiguous())


def transpose_reference(x_MN: Tensor) -> Tensor:
    """The twin."""
    return x_MN.t().contiguous()
