"""Conversion between dtypes in code that torch.compile traces."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype; where it has it already, x itself, and no operation.

    `x.to(dtype)` would be an operation that returns its argument. At the end of an autograd.Function, torch 2.11 then
    takes one tensor for two results, and sends the gradient to the wrong one: pytorch/pytorch#180642.
    """
    return x if x.dtype == dtype else x.to(dtype)
