"""Triton kernel that puts the gradients of queries, keys and values side by side.

It also turns them back where they were turned, and sums them over the rows where that is wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.launch_grid import make_launch_grid
from gptmill.models.kernels.wrapped_triton import wrap

COLUMNS = 1024


class Work(NamedTuple):
    """How a program goes about it."""

    rows: int
    stages: int
    """Of rows on their way from memory."""
    warps: int


PLAIN_WORK, TURNING_WORK = Work(4, 3, 4), Work(2, 1, 8)  # which needs more registers


@triton.jit
def pack_qkv_gradients_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, joined_ptr, sums_ptr, rows, time, width, head_width,
    q_batch, q_time, q_head, k_batch, k_time, k_head, v_batch, v_time, v_head,
    IS_TURNED: tl.constexpr, HAS_SUMS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
    head, number = (columns // head_width).to(tl.int64) * by_head, columns % head_width
    is_first = number < head_width // 2
    partner = tl.where(is_first, number + head_width // 2, number - head_width // 2)
    sign = tl.where(is_first, 1.0, -1.0)
    is_turned_column = columns < tl.where(part < 2, width, 0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, COUNT, ROWS, num_stages=STAGES):
        row = program * COUNT + start + tl.arange(0, ROWS)
        is_inside = (row < rows)[:, None] & is_column[None, :]
        from_row = (row // time).to(tl.int64) * by_batch + (row % time).to(tl.int64) * by_time
        x = tl.load(source + from_row[:, None] + (head + number)[None, :], mask=is_inside, other=0.0).to(tl.float32)
        if IS_TURNED:
            is_transposed = (row < rows)[:, None] & is_turned_column[None, :]
            y = tl.load(source + from_row[:, None] + (head + partner)[None, :], mask=is_transposed, other=0.0)
            angles = (row % time)[:, None] * head_width
            cos = tl.load(cos_ptr + angles + number[None, :], mask=is_transposed, other=1.0)
            sin = tl.load(sin_ptr + angles + partner[None, :], mask=is_transposed, other=0.0)
            x = x * cos + y.to(tl.float32) * sin * sign[None, :]
        here = row.to(tl.int64)[:, None] * (3 * width) + part * width + columns[None, :]
        tl.store(joined_ptr + here, x.to(joined_ptr.dtype.element_ty), mask=is_inside)
        if HAS_SUMS:
            total += x
    if HAS_SUMS:
        place = sums_ptr + program * (3 * width) + part * width + columns
        tl.store(place, tl.sum(total, axis=0), mask=is_column)


def run_join(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    B, T, H, D = q_BTHD.shape
    rows, width = B * T, H * D
    work = PLAIN_WORK if cos_TD is None else TURNING_WORK
    programs, count = make_launch_grid(rows, work.rows)
    joined_BTE = q_BTHD.new_empty(B, T, 3 * width)
    sums_PE = q_BTHD.new_empty(programs, 3 * width if with_sums else 0, dtype=torch.float32)
    strides = [part.stride(dim) for part in (q_BTHD, k_BTHD, v_BTHD) for dim in (0, 1, 2)]
    wrap(pack_qkv_gradients_kernel)[(programs, triton.cdiv(width, COLUMNS), 3)](
        q_BTHD, k_BTHD, v_BTHD, q_BTHD if cos_TD is None else cos_TD, q_BTHD if sin_TD is None else sin_TD,
        joined_BTE, sums_PE, rows, T, width, D, *strides, IS_TURNED=cos_TD is not None, HAS_SUMS=with_sums,
        COUNT=count, ROWS=work.rows, COLUMNS=COLUMNS, STAGES=work.stages, num_warps=work.warps,
    )  # fmt: skip
    return joined_BTE, sums_PE.sum(dim=0)
