"""Operations that torch.compile looks into: what it finds there, it starts itself, and fuses with what is around."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

# Where there is no Triton, torch would say for each of them, to people who need no kernels, that it found none.
logging.getLogger("torch._library.triton").addFilter(lambda record: "Triton not available" not in record.getMessage())


def make_operation(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """A decorator. The function tells by its inputs' device what to do, and changes none of them."""
    decorator: Callable[[Callable[..., Any]], CustomOpDef] = torch.library.triton_op(
        f"gptmill::{name}", mutates_args=()
    )
    return decorator
