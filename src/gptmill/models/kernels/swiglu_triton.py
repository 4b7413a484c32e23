"""Triton kernel of the backward pass through SwiGLU's activation; the formulas are those of `swiglu.py`.

It reads d_y and both halves of x and writes both halves of dx, 5 N F e bytes. Storing d_gate and d_up straight into one
tensor, as the packed projection's gradient needs them, saves a concatenation: 2 N F e bytes read and as many written.
The operation is elementwise and has nothing to sum up, so a program takes one block of COLUMNS columns of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.triton_launch import wrap

COLUMNS = 1024


@triton.jit
def swiglu_backward_kernel(d_y_ptr, x_ptr, dx_ptr, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < width
    offsets = row * 2 * width + columns
    d_y = tl.load(d_y_ptr + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + offsets + width, mask=is_inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d_y * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d_y * gate * sigmoid
    tl.store(dx_ptr + offsets, d_gate.to(dx_ptr.dtype.element_ty), mask=is_inside)
    tl.store(dx_ptr + offsets + width, d_up.to(dx_ptr.dtype.element_ty), mask=is_inside)


def run_backward(d_y_NF: Tensor, x_NE: Tensor) -> Tensor:
    rows, width = d_y_NF.shape
    dx_NE = x_NE.new_empty(x_NE.shape)
    wrap(swiglu_backward_kernel)[(rows, triton.cdiv(width, COLUMNS))](
        d_y_NF, x_NE, dx_NE, width, COLUMNS=COLUMNS, num_warps=4
    )
    return dx_NE
