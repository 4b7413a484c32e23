"""The custom ops as torch.compile meets them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

from gptmill.config.run import CompileMode, KernelChoice
from gptmill.models.kernels.cublaslt import has_library
from gptmill.models.kernels.custom_ops import register_custom_ops
from gptmill.models.kernels.gemm_pass import build_gemm_pass

OPAQUE_OPS = (
    "gptmill::dropout_mask",
    "gptmill::fp8_linear_cross_entropy",
    "gptmill::gemm",
    "gptmill::gemm_dgelu",
    "gptmill::gemm_fp32",
    "gptmill::gemm_gelu",
    "gptmill::linear_cross_entropy",
)


def prepare_compiler() -> None:
    """Registers the custom ops with torch.compile.

    For an opaque op that is not on its allow list, Inductor logs every input in full, with that input's own inputs:
    after a dozen layers this text has no end. And its cache knows custom ops by name only: the tag makes it forget
    them when their code changes.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    register_custom_ops()
    FALLBACK_ALLOW_LIST.update(OPAQUE_OPS)
    files = sorted(Path(__file__).parent.glob("*.py"))
    code = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    torch.compiler.config.cache_key_tag = f"gptmill {code}"


def list_kernel_options(used: KernelChoice, mode: CompileMode) -> dict[str, Any]:
    """Options for torch.compile: autotuned GEMMs, unless torch.compile is to autotune them itself."""
    is_left_to_torch = mode.startswith("max-autotune") or torch.are_deterministic_algorithms_enabled()
    if used != "auto" or is_left_to_torch or not has_library():
        return {}
    return {"post_grad_custom_post_pass": build_gemm_pass()}
