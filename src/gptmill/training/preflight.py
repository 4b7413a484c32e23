"""The quick part of gptmill doctor, before a run prepares its corpus: what would fail or fall back later fails now.

Each check takes milliseconds, and looks only at what the config asks for.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from gptmill.config.errors import UserError
from gptmill.config.optimizer import AdamW8bit
from gptmill.config.run import AttentionBackend, PrecisionName, RunConfig
from gptmill.models.fused.dispatch import PRECISIONS
from gptmill.models.kernels.support import has_kernels
from gptmill.models.parameters import count_parameters
from gptmill.runs.checkpoints.disk_space import MARGIN_BYTES, format_bytes, free_bytes
from gptmill.runtime.precision import AUTOCAST_DTYPES, choose_precision
from gptmill.runtime.toolchain import find_obstacle
from gptmill.runtime.world import World

BYTES_PER_WEIGHT = 4  # without the optimizer's state: what every checkpoint holds at least
FIRST_BF16 = (8, 0)


def check_machine(config: RunConfig, world: World, *, is_new: bool) -> None:
    """Raises UserError with the fix for what this machine cannot do."""
    precision = choose_precision(config.machine.precision, world.device)
    check_attention_backend(config, precision, world.device)
    check_compiler(config, precision, world.device)
    check_libraries(config)
    world.run_on_main(partial(check_logdir, config, is_new=is_new))
    if world.is_main and (warning := find_slow_precision(precision, world.device)):
        sys.stderr.write(f"warning: {warning}\n")


def check_compiler(config: RunConfig, precision: PrecisionName, device: torch.device) -> None:
    """torch.compile needs a compiler; on a GPU, so do the fused kernels."""
    uses_kernels = config.machine.kernels != "none" and precision in PRECISIONS and has_kernels(device)
    if not (config.machine.compile or uses_kernels) or device.type == "mps":
        return
    obstacle = find_obstacle(device.type)
    if obstacle is None or (device.type == "cuda" and _has_built_triton()):
        return
    asked = "--compile" if config.machine.compile else f"--kernels {config.machine.kernels}"
    without = "--no_compile" if device.type == "cpu" else "--no_compile --kernels none"
    raise UserError(f"{asked}: {obstacle.what}; fix that: {obstacle.fix}; or train without it: {without}")


def _has_built_triton() -> bool:
    """Whether Triton works all the same, since what it compiles for itself is in its cache."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception:  # whatever it lacks, it cannot be used
        return False
    return True


def check_attention_backend(config: RunConfig, precision: PrecisionName, device: torch.device) -> None:
    """SDPA falls back to the slow formula for what a backend does not support; one that was asked for should run."""
    backend = config.machine.attention_backend
    if device.type != "cuda" or backend in ("auto", "math") or config.model.own_parts:
        return
    dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
    if _supports(backend, config, dtype, device):
        return
    raise UserError(
        f"--attention_backend {backend} does not run on {torch.cuda.get_device_name(device)} in {precision} with heads "
        f"of {config.model.head_width} channels; use --attention_backend auto"
    )


def _supports(backend: AttentionBackend, config: RunConfig, dtype: torch.dtype, device: torch.device) -> bool:
    model, cuda = config.model, torch.backends.cuda
    shape = (1, model.num_heads, min(model.context_length, 128), model.head_width)
    query, key, value = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    params = cuda.SDPAParams(query, key, value, None, 0.0, True, False)
    can_use = {
        "flash": cuda.can_use_flash_attention,
        "cudnn": cuda.can_use_cudnn_attention,
        "efficient": cuda.can_use_efficient_attention,
    }
    return bool(can_use[backend](params, debug=False))


def check_libraries(config: RunConfig) -> None:
    """Libraries of extras that are imported only when the state is built."""
    if isinstance(config.optimizer.optimizer, AdamW8bit) and find_spec("torchao") is None:
        raise UserError("optimizer adamw8bit needs torchao; install it with: pip install 'gptmill[quant]'")


def check_logdir(config: RunConfig, *, is_new: bool) -> None:
    """The folder of runs can be written, and has room for the weights of a checkpoint; the exact check comes later."""
    logdir = Path(config.tracking.logdir)
    folder = logdir / (config.tracking.run_name or "")
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{existing} is a file, but the run would be a folder in it; choose another --logdir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: {existing} is read-only for this user; choose another --logdir")
    if not is_new or config.model.own_parts:
        return  # what its checkpoints may free, and the weights of a plug-in, are counted later
    least = count_parameters(config.model, 1).total * BYTES_PER_WEIGHT + MARGIN_BYTES
    if least > free_bytes(folder):
        raise UserError(
            f"a checkpoint takes at least {format_bytes(least)}, but only {format_bytes(free_bytes(folder))} are free "
            f"in {existing}; free disk space or choose another --logdir"
        )


def find_slow_precision(precision: PrecisionName, device: torch.device) -> str:
    """A warning for a precision that the GPU only emulates; empty if there is nothing to say."""
    if precision != "bf16" or device.type != "cuda" or torch.version.hip is not None:
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= FIRST_BF16:
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has CUDA capability {capability[0]}.{capability[1]} and emulates bf16, "
        f"slowly; use --precision fp16"
    )
