"""Triton kernel that packs the gradients of queries, keys and values: inverse RoPE, concatenation and bias gradient.

The packed QKV projection needs one gradient of E = 3 H D columns; attention returns three tensors of H heads of D
channels, in strides of its own. In one pass the kernel

- undoes the rotation of dQ and dK where the model has RoPE (Su et al. 2021). Channel i < D/2 is paired with i + D/2;
  the rotation is orthogonal, so its gradient is the rotation by the opposite angle:
      dx[i]       = d[i] * cos[i] + d[i + D/2] * sin[i + D/2]
      dx[i + D/2] = d[i + D/2] * cos[i + D/2] - d[i] * sin[i]
- stores all three side by side,
- sums them over all tokens where the projection has a bias.

As separate operations this moves 4 N H D e bytes to rotate, 6 N H D e to concatenate and 3 N H D e to sum; fused it is
6 N H D e. A pair's other half is loaded again rather than exchanged between threads: it lies in the same head of the
same row, hence in the cache.

The third dimension of the grid is which of Q, K and V; the others are, as in `bias_gelu_triton.py`, a range of rows and
a block of columns. Partial sums of each program, P x E in fp32, are added up afterwards, without atomics.

Shape suffixes: B batch, T sequence, N = B x T tokens, H heads, D head dimension, E = 3 H D, P programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.triton_launch import make_launch_grid, wrap

COLUMNS = 1024


class LaunchConfig(NamedTuple):
    rows: int
    """That a program handles at once."""
    stages: int
    """Of software pipelining: how many loads of rows are in flight."""
    warps: int


PLAIN_LAUNCH, ROPE_LAUNCH = LaunchConfig(4, 3, 4), LaunchConfig(2, 1, 8)  # RoPE needs more registers


@triton.jit
def pack_qkv_gradients_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, packed_ptr, sums_ptr, rows, time, width, head_width,
    q_batch, q_time, q_head, k_batch, k_time, k_head, v_batch, v_time, v_head,
    HAS_ROPE: tl.constexpr, HAS_SUMS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program, part = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    source, by_batch, by_head, by_time = q_ptr, q_batch, q_head, q_time
    if part == 1:
        source, by_batch, by_head, by_time = k_ptr, k_batch, k_head, k_time
    if part == 2:
        source, by_batch, by_head, by_time = v_ptr, v_batch, v_head, v_time
    head, channel = (columns // head_width).to(tl.int64) * by_head, columns % head_width
    is_first = channel < head_width // 2
    partner = tl.where(is_first, channel + head_width // 2, channel - head_width // 2)
    sign = tl.where(is_first, 1.0, -1.0)
    is_rotated_column = columns < tl.where(part < 2, width, 0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, COUNT, ROWS, num_stages=STAGES):
        row = program * COUNT + start + tl.arange(0, ROWS)
        is_inside = (row < rows)[:, None] & is_column[None, :]
        from_row = (row // time).to(tl.int64) * by_batch + (row % time).to(tl.int64) * by_time
        x = tl.load(source + from_row[:, None] + (head + channel)[None, :], mask=is_inside, other=0.0).to(tl.float32)
        if HAS_ROPE:
            is_rotated = (row < rows)[:, None] & is_rotated_column[None, :]
            y = tl.load(source + from_row[:, None] + (head + partner)[None, :], mask=is_rotated, other=0.0)
            angles = (row % time)[:, None] * head_width
            cos = tl.load(cos_ptr + angles + channel[None, :], mask=is_rotated, other=1.0)
            sin = tl.load(sin_ptr + angles + partner[None, :], mask=is_rotated, other=0.0)
            x = x * cos + y.to(tl.float32) * sin * sign[None, :]
        offsets = row.to(tl.int64)[:, None] * (3 * width) + part * width + columns[None, :]
        tl.store(packed_ptr + offsets, x.to(packed_ptr.dtype.element_ty), mask=is_inside)
        if HAS_SUMS:
            total += x
    if HAS_SUMS:
        sums_row_ptr = sums_ptr + program * (3 * width) + part * width + columns
        tl.store(sums_row_ptr, tl.sum(total, axis=0), mask=is_column)


def run_pack(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Returns the packed gradient and, in fp32, its sum over all tokens, which is empty unless asked for."""
    B, T, H, D = q_BTHD.shape
    rows, width = B * T, H * D
    launch = PLAIN_LAUNCH if cos_TD is None else ROPE_LAUNCH
    programs, count = make_launch_grid(rows, launch.rows)
    packed_BTE = q_BTHD.new_empty(B, T, 3 * width)
    sums_PE = q_BTHD.new_empty(programs, 3 * width if with_sums else 0, dtype=torch.float32)
    strides = [part.stride(dim) for part in (q_BTHD, k_BTHD, v_BTHD) for dim in (0, 1, 2)]
    wrap(pack_qkv_gradients_kernel)[(programs, triton.cdiv(width, COLUMNS), 3)](
        q_BTHD, k_BTHD, v_BTHD, q_BTHD if cos_TD is None else cos_TD, q_BTHD if sin_TD is None else sin_TD,
        packed_BTE, sums_PE, rows, T, width, D, *strides, HAS_ROPE=cos_TD is not None, HAS_SUMS=with_sums,
        COUNT=count, ROWS=launch.rows, COLUMNS=COLUMNS, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    return packed_BTE, sums_PE.sum(dim=0)
