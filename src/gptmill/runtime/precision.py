"""Number formats: which one, the autocast context of the forward pass, and fp16's gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import PrecisionName

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: PrecisionName, device: torch.device) -> PrecisionName:
    """`wanted`, with "auto" resolved for the device."""
    if wanted == "tf32" and device.type != "cuda":
        raise UserError(
            f"precision tf32 is a format of NVIDIA GPUs, and this run is on {device.type}; use fp32 or bf16"
        )
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def set_matmul_precision(precision: PrecisionName) -> None:
    """Lets fp32 matmuls run on TF32 units, unless plain fp32 was asked for."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def make_autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """The context that a forward pass runs in."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_scaler(precision: PrecisionName, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss so that fp16 gradients do not underflow; does nothing for the other formats."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
