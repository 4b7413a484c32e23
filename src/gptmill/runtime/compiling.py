"""Options for torch.compile, avoiding known miscompilations. Imports the compiler only where it is used."""

from __future__ import annotations

import warnings
from functools import cache
from threading import Thread
from typing import Any

from gptmill.config.run import CompileMode

RECOMPILE_LIMIT = 64
NON_LEAF_WARNING = "The .grad attribute of a Tensor that is not a leaf"
COMPILER_ERROR = "TorchDynamoException"  # compared by name, to avoid importing the compiler


@cache
def load_compiler() -> Thread:
    """Imports torch's compiler, which takes seconds, in a thread while the GPU and the corpus are opened.

    Join the thread before importing parts of the compiler: concurrent imports interfere with each other.
    """
    thread = Thread(target=_import_compiler, name="compiler", daemon=True)
    thread.start()
    return thread


def _import_compiler() -> None:
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.lowering  # noqa: F401


def forget_compiled() -> None:
    """Clears torch.compile's caches: they count every model of a process towards one recompile limit."""
    from torch import _dynamo

    _dynamo.reset()


def list_compile_options(mode: CompileMode = "default") -> dict[str, Any]:
    """Options of a mode for torch.compile, without CUDA graphs, which training.micro_batch captures itself.

    Inductor's CUDA graphs are wrong under gradient accumulation: pytorch/pytorch#169545.

    Mixed-order reductions, new in torch 2.10, left parts of gradients unwritten in models with norms and biases:
    pytorch/pytorch#190796 and #193061.
    """
    from torch._inductor import config, list_mode_options

    options = {name: value for name, value in list_mode_options(mode).items() if name != "triton.cudagraphs"}
    if hasattr(config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options


def cache_custom_autograd() -> None:
    """Lets torch.compile cache models with custom autograd functions across processes, which is off by default.

    Its cache key covers the code of forward and backward; models.kernels.compiler adds that of opaque custom ops.
    """
    from torch._functorch import config as aot_config

    if hasattr(aot_config, "autograd_cache_allow_custom_autograd_functions"):
        aot_config.autograd_cache_allow_custom_autograd_functions = True


def raise_recompile_limit() -> None:
    """Raises torch.compile's recompile limit to what the parts of a model may need: by layer, mode and shape.

    Also silences its warning about the .grad of non-leaf inputs, which dynamo itself reads.
    """
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
    warnings.filterwarnings("ignore", NON_LEAF_WARNING)


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed, as it does when a signal to the process group kills its worker processes."""
    return any(kind.__name__ == COMPILER_ERROR for kind in type(error).__mro__)
