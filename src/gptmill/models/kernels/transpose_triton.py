"""Triton kernel that turns a matrix of bytes, a tile at a time.

It reads four numbers at once, as a word; of four such words from four rows it makes those of the four columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 4  # bytes
ROWS, COLUMNS = 32, 32  # words of a tile


@triton.jit
def transpose_kernel(x_ptr, turned_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`rows` and `columns` count words."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    here = x_ptr + row[:, None] * (4 * columns) + column[None, :]
    first = tl.load(here, mask=is_inside, other=0)
    second = tl.load(here + columns, mask=is_inside, other=0)
    third = tl.load(here + 2 * columns, mask=is_inside, other=0)
    fourth = tl.load(here + 3 * columns, mask=is_inside, other=0)
    is_inside = (column < columns)[:, None] & (row < rows)[None, :]
    there = turned_ptr + column[:, None] * (4 * rows) + row[None, :]
    for byte in tl.static_range(4):
        word = (first >> 8 * byte) & 0xFF
        word |= ((second >> 8 * byte) & 0xFF) << 8
        word |= ((third >> 8 * byte) & 0xFF) << 16
        word |= ((fourth >> 8 * byte) & 0xFF) << 24
        tl.store(there + byte * rows, tl.trans(word), mask=is_inside)


def run_transpose(x_MN: Tensor) -> Tensor:
    """Both sizes are multiples of a word's bytes."""
    rows, columns = (size // WORD for size in x_MN.shape)
    turned_NM = x_MN.new_empty(x_MN.shape[1], x_MN.shape[0])
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    transpose_kernel[grid](
        x_MN.view(torch.int32), turned_NM.view(torch.int32), rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    return turned_NM
