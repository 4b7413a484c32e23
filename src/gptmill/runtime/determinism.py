"""The same bits every time, where a GPU's fastest algorithms do not give them."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS shares one buffer between streams, in any order
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # else torch.compile chooses kernels by how fast they were just now
}


def set_deterministic(wanted: bool) -> None:
    """Allows only algorithms that give the same bits every time, or all of them. Call it before a model is built.

    An operation that has no such algorithm raises. Attention has: under this rule PyTorch never takes cuDNN's, and its
    flash and memory-efficient kernels add up their gradients in a fixed order.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:  # to say so again would import torch's compiler
        torch.use_deterministic_algorithms(wanted)
    if not wanted:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Else every new tensor is filled with NaN first, which helps only those who read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
