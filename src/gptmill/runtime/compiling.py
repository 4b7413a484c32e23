"""torch.compile, without what is known to give wrong numbers. It is imported only where something is compiled."""

from __future__ import annotations

import warnings
from functools import cache
from threading import Thread
from typing import Any

from gptmill.config.run import CompileMode

VERSIONS = 64
NO_LEAF = "The .grad attribute of a Tensor that is not a leaf"
COMPILER_ERROR = "TorchDynamoException"  # by its name


@cache
def load_compiler() -> Thread:
    """Imports torch's compiler, which takes seconds, in a thread: meanwhile a GPU can be woken and a corpus opened.

    Whoever may import parts of it too joins the thread first: two imports at once get in each other's way.
    """
    thread = Thread(target=_import_compiler, name="compiler", daemon=True)
    thread.start()
    return thread


def _import_compiler() -> None:
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.lowering  # noqa: F401


def list_compile_options(mode: CompileMode = "default") -> dict[str, Any]:
    """Options for torch.compile, those of a mode included, but for CUDA graphs: training.passes records its own.

    Torch's go wrong where gradients of several micro-batches are added up: pytorch/pytorch#169545.

    Reductions over rows and columns in one kernel, which torch has from 2.10 on, left parts of gradients unwritten in
    models with norms and biases: pytorch/pytorch#190796 and #193061.
    """
    from torch._inductor import config, list_mode_options

    options = {name: value for name, value in list_mode_options(mode).items() if name != "triton.cudagraphs"}
    if hasattr(config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options


def keep_compiled_gradients() -> None:
    """Has torch.compile find again, in a later process, what it made of a model that has gradients of its own.

    It keeps only models without them by default. What it keeps is told apart by the code of both ways; for operations
    that it does not look into, models.kernels.compiler sees to that.
    """
    from torch._functorch import config as aot_config

    if hasattr(aot_config, "autograd_cache_allow_custom_autograd_functions"):
        aot_config.autograd_cache_allow_custom_autograd_functions = True


def allow_parts() -> None:
    """Lets torch.compile keep as many versions of a part as a model may need: by layer, way of running and shape.

    It looks at the gradients of all that a part is given, and then warns that some have none.
    """
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, VERSIONS)
    warnings.filterwarnings("ignore", NO_LEAF)


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed, as it does when a signal to all processes ends a compiler that it has started."""
    return any(kind.__name__ == COMPILER_ERROR for kind in type(error).__mro__)
