"""Whether a device can run the kernels."""

from __future__ import annotations

from importlib.util import find_spec

import torch

CAPABILITY = (8, 0)


def has_kernels(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU of the Ampere generation or newer, with Triton installed."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY
