"""Triton kernel of the backward pass through bias and GELU: dx, and its sum over tokens, in one pass.

The formulas are those of `bias_gelu.py`. The gradient reads d_y and x and writes dx, 3 N F e bytes; summing dx for the
bias's gradient in the same pass saves reading it back, N F e bytes more.

The sum goes down the columns, while memory is laid out along the rows. So the grid is two-dimensional: each program
takes a block of COLUMNS columns and a range of COUNT rows, and adds the gradients of ROWS rows at a time to an fp32
tile in registers. At the end it reduces the tile to one row of partial sums and stores that: P x F in fp32, which a
second reduction adds up. Few programs with many rows each keep P small; without atomics the result is the same every
time. The loop is software-pipelined: the loads of the next rows are in flight while the current ones are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.triton_launch import make_launch_grid, wrap

COLUMNS = 1024
ROWS = 4
STAGES = 3  # of software pipelining


@triton.jit
def gelu_backward_kernel(
    d_y_ptr, x_ptr, bias_ptr, dx_ptr, sums_ptr, rows, width,
    SLOPE: tl.constexpr, CUBE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, COUNT, ROWS, num_stages=STAGES):
        row = program * COUNT + start + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * width + columns[None, :]
        is_inside = (row < rows)[:, None] & is_column[None, :]
        x = tl.load(x_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32) + bias[None, :]
        d_y = tl.load(d_y_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        square = x * x
        gate = tl.sigmoid(SLOPE * x * (1.0 + CUBE * square))
        slope = gate + x * gate * (1.0 - gate) * SLOPE * (1.0 + 3.0 * CUBE * square)
        dx = d_y * slope
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=is_inside)
        total += dx
    tl.store(sums_ptr + program * width + columns, tl.sum(total, axis=0), mask=is_column)


def run_backward(d_y_NF: Tensor, x_NF: Tensor, bias_F: Tensor, slope: float, cube: float) -> tuple[Tensor, Tensor]:
    """Returns dx and, in fp32, the bias's gradient; `slope` and `cube` are the constants of the tanh approximation."""
    rows, width = x_NF.shape
    programs, count = make_launch_grid(rows, ROWS)
    dx_NF = x_NF.new_empty(x_NF.shape)
    sums_PF = x_NF.new_empty(programs, width, dtype=torch.float32)
    wrap(gelu_backward_kernel)[(programs, triton.cdiv(width, COLUMNS))](
        d_y_NF, x_NF, bias_F, dx_NF, sums_PF, rows, width,
        SLOPE=slope, CUBE=cube, COUNT=count, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return dx_NF, sums_PF.sum(dim=0)
