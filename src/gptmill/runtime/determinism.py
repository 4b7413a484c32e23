"""Deterministic algorithms: bit-identical results, where the fastest GPU kernels do not give them."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # otherwise streams share one cuBLAS workspace, in any order
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # otherwise torch.compile picks kernels by timing them
}


def set_deterministic(wanted: bool) -> None:
    """Restricts torch to deterministic algorithms, or lifts the restriction. Call it before a model is built.

    An operation without a deterministic algorithm raises. Attention has one: PyTorch then never selects cuDNN, and its
    flash and memory-efficient kernels sum gradients in a fixed order.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:  # a redundant call would import torch's compiler
        torch.use_deterministic_algorithms(wanted)
    if not wanted:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # By default every new tensor is filled with NaN, which only helps code that reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
