"""Triton kernel that transposes a matrix of bytes, in tiles of 32-bit words.

Byte by byte, neighbouring threads would move one byte each, which uses a quarter of the width of memory instructions.
So the kernel treats four bytes along a row as one word. From four words in four consecutive rows, a 4 x 4 block of
bytes, it builds the four words of the transposed block by shifting and masking: word b takes byte b of each row. A
program does this for a tile of ROWS x COLUMNS such blocks and transposes the order of the blocks in registers
(`tl.trans`), so that both loads and stores run along rows. Each byte is read once and written once: 2 M N bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 4  # bytes
ROWS, COLUMNS = 32, 32  # of a tile, in words


@triton.jit
def transpose_kernel(x_ptr, transposed_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`rows` and `columns` count words."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    source_ptr = x_ptr + row[:, None] * (4 * columns) + column[None, :]
    first = tl.load(source_ptr, mask=is_inside, other=0)
    second = tl.load(source_ptr + columns, mask=is_inside, other=0)
    third = tl.load(source_ptr + 2 * columns, mask=is_inside, other=0)
    fourth = tl.load(source_ptr + 3 * columns, mask=is_inside, other=0)
    is_inside = (column < columns)[:, None] & (row < rows)[None, :]
    target_ptr = transposed_ptr + column[:, None] * (4 * rows) + row[None, :]
    for byte in tl.static_range(4):
        word = (first >> 8 * byte) & 0xFF
        word |= ((second >> 8 * byte) & 0xFF) << 8
        word |= ((third >> 8 * byte) & 0xFF) << 16
        word |= ((fourth >> 8 * byte) & 0xFF) << 24
        tl.store(target_ptr + byte * rows, tl.trans(word), mask=is_inside)


def run_transpose(x_MN: Tensor) -> Tensor:
    """Both sizes must be multiples of WORD."""
    rows, columns = (size // WORD for size in x_MN.shape)
    transposed_NM = x_MN.new_empty(x_MN.shape[1], x_MN.shape[0])
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    transpose_kernel[grid](
        x_MN.view(torch.int32), transposed_NM.view(torch.int32), rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    return transposed_NM
