"""Number formats: which one, the autocast context of the forward pass, and fp16's gradient scaler.

fp8 is a matter of single layers: the model's.
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
SLOW = 8.0  # times fp32's: far from what noise does, and from the 100 times of a Neoverse N1, which only emulates bf16
TURNS = 4


def choose_precision(wanted: PrecisionName, device: torch.device) -> PrecisionName:
    """`wanted`, with "auto" resolved for the device."""
    if wanted == "tf32" and device.type != "cuda":
        raise UserError(
            f"precision tf32 is a format of NVIDIA GPUs, and this run is on {device.type}; use fp32 or bf16"
        )
    if wanted == "fp8":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        require_fp8(describe_device(device), capability)
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def require_fp8(device_name: str, capability: tuple[int, int] | None) -> None:
    """Raises unless the device, whose CUDA capability is given if it has one, multiplies in fp8."""
    if capability is not None and capability >= FP8_CAPABILITY:
        return
    has = "" if capability is None else f", which has {capability[0]}.{capability[1]}"
    raise UserError(
        f"precision fp8 needs an NVIDIA GPU of CUDA capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or more "
        f"(Ada, Hopper and newer), and this run is on {device_name}{has}; use bf16, or fp8-emulated, which rounds "
        "alike on any device and is slow"
    )


def describe_precision(precision: PrecisionName, device: torch.device) -> str:
    """For people."""
    slow = " (much slower than fp32 on this CPU: use --precision fp32)" if is_slow(precision, device) else ""
    return f"{precision}{slow}"


def is_slow(precision: PrecisionName, device: torch.device) -> bool:
    """Whether the device is a CPU without units for a format, which may be slower by far than in fp32."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return device.type == "cpu" and dtype is not None and time_matmul(dtype) >= SLOW * time_matmul(torch.float32)


def time_matmul(dtype: torch.dtype) -> float:
    """Seconds of a small one on the CPU, at best."""
    matrix, seconds = torch.ones(64, 64, dtype=dtype), []
    for _ in range(TURNS):
        started = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def set_matmul_precision(precision: PrecisionName) -> None:
    """Lets fp32 matmuls run on TF32 units, unless plain fp32 was asked for."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    # In bf16 torch tries units that an ARM CPU may lack, and tells that, a stack trace long, before it does without.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)


def make_autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """The context that a forward pass runs in. Around fp8's matmuls it is bf16; around emulated ones, on GPUs alone."""
    dtype = AUTOCAST_DTYPES.get(precision)
    if precision == "fp8-emulated" and device.type == "cuda":
        dtype = torch.bfloat16
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_scaler(precision: PrecisionName, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss so that fp16 gradients do not underflow; does nothing for the other formats."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
