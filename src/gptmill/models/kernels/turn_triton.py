"""Triton kernel that turns a matrix of bytes, a tile at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 128


@triton.jit
def turn_kernel(x_ptr, turned_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    tile = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0)
    here = turned_ptr + column[:, None] * rows + row[None, :]
    tl.store(here, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])


def run_turn(x_MN: Tensor) -> Tensor:
    rows, columns = x_MN.shape
    turned_NM = x_MN.new_empty(columns, rows)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    turn_kernel[grid](
        x_MN.view(torch.uint8), turned_NM.view(torch.uint8), rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    return turned_NM
