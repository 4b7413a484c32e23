"""Mixed precision: which format, the autocast context of the forward pass, and fp16's gradient scaler.

fp8 is chosen per layer, in the model.
"""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import PrecisionName
from gptmill.runtime.device import describe_device

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
FP8_CAPABILITY = (8, 9)
SLOW_FACTOR = 8.0  # relative to fp32: well above timing noise, well below the 100 of a Neoverse N1, which emulates bf16
REPEATS = 4


def choose_precision(wanted: PrecisionName, device: torch.device) -> PrecisionName:
    """Resolves "auto" for the device; raises UserError for a precision that the device does not support."""
    if wanted == "tf32" and device.type != "cuda":
        raise UserError(f"precision tf32 needs an NVIDIA GPU, and this run is on {device.type}; use fp32 or bf16")
    if wanted == "fp8":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        require_fp8(describe_device(device), capability)
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def require_fp8(device_name: str, capability: tuple[int, int] | None) -> None:
    """Raises UserError unless the device supports fp8 matmuls; `capability` is its CUDA capability, if it has one."""
    if capability is not None and capability >= FP8_CAPABILITY:
        return
    has = "" if capability is None else f", which has {capability[0]}.{capability[1]}"
    raise UserError(
        f"precision fp8 needs an NVIDIA GPU of CUDA capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or more "
        f"(Ada, Hopper and newer), and this run is on {device_name}{has}; use bf16, or fp8-emulated, which rounds "
        "the same way on any device but is slow"
    )


def describe_precision(precision: PrecisionName, device: torch.device) -> str:
    """The precision for the log, with a warning where it is slow."""
    slow = " (much slower than fp32 on this CPU: use --precision fp32)" if is_slow(precision, device) else ""
    return f"{precision}{slow}"


def is_slow(precision: PrecisionName, device: torch.device) -> bool:
    """Whether the device is a CPU that only emulates this precision and is far slower in it than in fp32."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return device.type == "cpu" and dtype is not None and time_matmul(dtype) >= SLOW_FACTOR * time_matmul(torch.float32)


def time_matmul(dtype: torch.dtype) -> float:
    """Best time of a small matmul on the CPU, in seconds."""
    matrix, seconds = torch.ones(64, 64, dtype=dtype), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def set_matmul_precision(precision: PrecisionName) -> None:
    """Lets fp32 matmuls use TF32, unless the precision is fp32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    # On ARM CPUs without bf16 instructions, torch warns with a stack trace before it falls back.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)


def make_autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of a forward pass. With fp8 it is bf16; with emulated fp8, bf16 on GPUs only."""
    dtype = find_autocast_dtype(precision, device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def find_autocast_dtype(precision: PrecisionName, device: torch.device) -> torch.dtype | None:
    """What GEMMs compute in where that is not fp32."""
    if precision == "fp8-emulated" and device.type == "cuda":
        return torch.bfloat16
    return AUTOCAST_DTYPES.get(precision)


def build_scaler(precision: PrecisionName, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling, so that fp16 gradients do not underflow; disabled in other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
