"""torch.compile, without what is known to give wrong numbers."""

from __future__ import annotations

from torch._inductor import config


def list_compile_options() -> dict[str, bool]:
    """Options for torch.compile.

    Reductions over rows and columns in one kernel, which torch has from 2.10 on, left parts of gradients unwritten in
    models with norms and biases: pytorch/pytorch#190796 and #193061.
    """
    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
