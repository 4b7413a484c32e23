"""Registers the kernels' operations with torch, so that torch.compile can handle them.

torch.compile traces a model with fake tensors, which have a shape, a dtype and a device but no data. What it cannot
trace, such as a call of a C library, has to be a single node of the graph: a custom op. Each op has a fake
implementation, which returns empty tensors and tells the compiler the shapes and dtypes of the results. There are three
kinds:

- `make_custom_op`, by torch.library.triton_op, for Triton kernels. The compiler looks into the op, finds the kernel
  launches in it, generates code that launches them itself, and fuses the tensor operations around them.
- `define_opaque_op`, by a bare torch.library definition, for GEMMs, whose algorithm is chosen at run time. The compiler
  calls the op as it is. This form costs the host least, and has no gradient.
- torch.library.custom_op itself, in the modules of ops that are opaque and need a gradient or a tag.

All ops are functional: they change none of their inputs. triton_op imports the compiler, which takes seconds, so ops of
the first kind are registered on first use, or all at once before compiling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

# Without Triton, torch would warn once for each op, which is of no use where no kernel runs.
logging.getLogger("torch._library.triton").addFilter(lambda record: "Triton not available" not in record.getMessage())


_library = torch.library.Library("gptmill", "FRAGMENT")


def define_opaque_op(schema: str, function: Callable[..., Any], make_fake: Callable[..., Any]) -> None:
    """Registers an op that the compiler does not look into. It has no gradient; `make_fake` returns empty results."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"gptmill::{name}", make_fake, lib=_library)


class CustomOp:
    """An op that the compiler looks into. It is registered on first use."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._fake: Callable[..., Any] | None = None
        self._gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._is_registered = False

    def __call__(self, *arguments: Any) -> Any:
        self.register()
        return getattr(torch.ops.gptmill, self._name)(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator: the function returns empty results, whose shapes and dtypes the compiler reads."""
        self._fake = function
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Sets the backward pass, and the function that saves what it needs."""
        self._gradient = backward, setup_context

    def register(self) -> None:
        """Registers the op with torch, unless that has been done."""
        if self._is_registered:
            return
        definition: CustomOpDef = torch.library.triton_op(f"gptmill::{self._name}", mutates_args=())(self._function)
        if self._fake is not None:
            definition.register_fake(self._fake)
        if self._gradient is not None:
            definition.register_autograd(self._gradient[0], setup_context=self._gradient[1])
        self._is_registered = True


_custom_ops: list[CustomOp] = []


def make_custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """A decorator: makes an op of a function that chooses its implementation by the device of its inputs."""

    def make(function: Callable[..., Any]) -> CustomOp:
        _custom_ops.append(CustomOp(name, function))
        return _custom_ops[-1]

    return make


def register_custom_ops() -> None:
    """Registers all ops, before the compiler meets one."""
    for op in _custom_ops:
        op.register()
