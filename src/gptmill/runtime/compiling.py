"""torch.compile, without what is known to give wrong numbers."""

from __future__ import annotations

from torch._inductor import config

COMPILER_ERROR = "TorchDynamoException"  # by its name: the compiler itself is not loaded where nothing is compiled


def list_compile_options() -> dict[str, bool]:
    """Options for torch.compile.

    Reductions over rows and columns in one kernel, which torch has from 2.10 on, left parts of gradients unwritten in
    models with norms and biases: pytorch/pytorch#190796 and #193061.
    """
    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed, as it does when a signal to all processes ends a compiler that it has started."""
    return any(kind.__name__ == COMPILER_ERROR for kind in type(error).__mro__)
