"""How operations are told to torch.

torch.compile looks into most: what it finds there, it starts itself, and fuses with what is around. Opaque ones it just
calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

# Where there is no Triton, torch would say for each of them, to people who need no kernels, that it found none.
logging.getLogger("torch._library.triton").addFilter(lambda record: "Triton not available" not in record.getMessage())


_library = torch.library.Library("gptmill", "FRAGMENT")


def define_opaque_op(schema: str, function: Callable[..., Any], make_empty: Callable[..., Any]) -> None:
    """An operation that costs the host as little as one can. It changes none of its inputs; nor has it gradients."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"gptmill::{name}", make_empty, lib=_library)


class CustomOp:
    """Is told to torch when it is first needed: that imports the compiler, which takes seconds."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._fake: Callable[..., Any] | None = None
        self._gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._is_registered = False

    def __call__(self, *arguments: Any) -> Any:
        self.register()
        return getattr(torch.ops.gptmill, self._name)(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator: the function makes empty results, which the compiler reads shapes and formats from."""
        self._fake = function
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """The way back, and what is kept for it."""
        self._gradient = backward, setup_context

    def register(self) -> None:
        """Tells torch, once."""
        if self._is_registered:
            return
        definition: CustomOpDef = torch.library.triton_op(f"gptmill::{self._name}", mutates_args=())(self._function)
        if self._fake is not None:
            definition.register_fake(self._fake)
        if self._gradient is not None:
            definition.register_autograd(self._gradient[0], setup_context=self._gradient[1])
        self._is_registered = True


operations: list[CustomOp] = []


def make_custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """A decorator. The function tells by its inputs' device what to do, and changes none of them."""

    def make(function: Callable[..., Any]) -> CustomOp:
        operations.append(CustomOp(name, function))
        return operations[-1]

    return make


def register_custom_ops() -> None:
    """All of them, before the compiler meets one."""
    for operation in operations:
        operation.register()
