"""Keeps what training sets for the whole process from outliving it: a program may train again, or do other things."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from gptmill.runtime.determinism import ENVIRONMENT


@contextmanager
def restore_torch_settings() -> Iterator[None]:
    """Restores on exit: random generators, matmul precision, attention backends and deterministic algorithms.

    And oneDNN, which torch switches off for good after the first bf16 matmul on an ARM CPU that has no bf16: what is
    computed later in fp32 would have other bits.
    """
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    generators = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda_generator = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    is_deterministic, warns_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills_memory: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn_settings = cudnn.deterministic, cudnn.benchmark
    precision, uses_onednn = torch.get_float32_matmul_precision(), mkldnn.enabled
    backends = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.default_generator.set_state(generators[2])
        if cuda_generator is not None:
            torch.cuda.set_rng_state(cuda_generator)
        if torch.are_deterministic_algorithms_enabled() != is_deterministic:
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = cudnn_settings
        torch.set_float32_matmul_precision(precision)
        if mkldnn.enabled != uses_onednn:
            mkldnn.enabled = uses_onednn
        for enable, was_enabled in zip(
            (cuda.enable_cudnn_sdp, cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp), backends, strict=True
        ):
            enable(was_enabled)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
