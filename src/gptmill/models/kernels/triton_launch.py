"""What launching a Triton kernel takes: a form that torch.compile can trace, and a grid for row sums."""

from __future__ import annotations

from typing import Any

from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

MAX_PROGRAMS = 128  # per block of columns: enough to fill a GPU, few enough to add up their partial sums quickly
MAX_ROWS = 512


def wrap(kernel: Any) -> Any:
    """The kernel for a launch inside a custom op that torch.compile traces.

    Kernels of Triton's interpreter have another type, which torch may refuse: they are returned as they are.
    """
    return wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel


def make_launch_grid(rows: int, rows_at_once: int) -> tuple[int, int]:
    """Divides the rows of a matrix among programs that each also sum up theirs.

    Returns the number of programs and the rows of each: a power-of-two multiple of `rows_at_once`, which doubles until
    MAX_PROGRAMS suffice or MAX_ROWS are reached.
    """
    count = rows_at_once
    while count < MAX_ROWS and count * MAX_PROGRAMS < rows:
        count *= 2
    return (rows + count - 1) // count, count
