"""Triton kernel of the backward pass through SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.wrapped_triton import wrap

COLUMNS = 1024


@triton.jit
def swiglu_backward_kernel(d_y_ptr, x_ptr, dx_ptr, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < width
    here = row * 2 * width + columns
    d_y = tl.load(d_y_ptr + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + here, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + here + width, mask=is_inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d_y * up * share * (1.0 + gate * (1.0 - share))
    d_up = d_y * gate * share
    tl.store(dx_ptr + here, d_gate.to(dx_ptr.dtype.element_ty), mask=is_inside)
    tl.store(dx_ptr + here + width, d_up.to(dx_ptr.dtype.element_ty), mask=is_inside)


def run_backward(d_y_NF: Tensor, x_NE: Tensor) -> Tensor:
    rows, width = d_y_NF.shape
    dx_NE = x_NE.new_empty(x_NE.shape)
    wrap(swiglu_backward_kernel)[(rows, triton.cdiv(width, COLUMNS))](
        d_y_NF, x_NE, dx_NE, width, COLUMNS=COLUMNS, num_warps=4
    )
    return dx_NE
