"""Triton kernels as torch.compile sees them."""

from __future__ import annotations

from typing import Any

from torch.library import wrap_triton
from triton.runtime.jit import JITFunction


def wrap(kernel: Any) -> Any:
    """For a launch within an operation. Where Triton interprets, kernels are of a kind that torch may refuse."""
    return wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel
