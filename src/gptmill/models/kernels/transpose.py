"""Transposes matrices of one-byte elements: fp8 GEMMs need both operands contiguous along the summed dimension.

In bf16 the tensor cores read an operand in either order; in fp8, on Ada and Hopper, only "K-major", where the K
elements that are multiplied and summed lie next to each other. A matrix that is K-major in the forward GEMM is not in
the GEMMs of the gradients, which sum over another of its dimensions, so it has to be copied in transposed order.
"""

from __future__ import annotations

from torch import Tensor


def transpose_bytes(x_MN: Tensor) -> Tensor:
    """The transpose, as a contiguous matrix."""
    assert x_MN.element_size() == 1, "only one-byte elements"
    if x_MN.device.type != "cuda":
        return transpose_reference(x_MN)
    from gptmill.models.kernels.transpose_triton import run_transpose

    return run_transpose(x_MN.contiguous())


def transpose_reference(x_MN: Tensor) -> Tensor:
    """Reference implementation."""
    return x_MN.t().contiguous()
