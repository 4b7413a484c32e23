"""Triton kernel of the embeddings in a decode step: token and position, added in fp32.

Shape suffixes: B sequences, C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def embed_kernel(
    tokens_ptr, positions_ptr, table_ptr, position_table_ptr, result_ptr, width,
    HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    x = tl.load(table_ptr + tl.load(tokens_ptr + row) * width + columns, mask=is_inside).to(tl.float32)
    if HAS_POSITIONS:
        place = position_table_ptr + tl.load(positions_ptr + row) * width + columns
        x += tl.load(place, mask=is_inside).to(tl.float32)
    tl.store(result_ptr + row * width + columns, x, mask=is_inside)


def run_embed(
    tokens_B: Tensor, positions_B: Tensor, table_VC: Tensor, position_table_SC: Tensor | None, result_BC: Tensor
) -> None:
    rows, width = result_BC.shape
    table = table_VC if position_table_SC is None else position_table_SC
    embed_kernel[(rows,)](
        tokens_B, positions_B, table_VC, table, result_BC, width,
        HAS_POSITIONS=position_table_SC is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
