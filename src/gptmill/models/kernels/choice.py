"""Which of a model's parts use the kernels."""

from __future__ import annotations

from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

from gptmill.config.run import CompileMode, KernelChoice, PrecisionName
from gptmill.models.feed_forward import Mlp
from gptmill.models.gpt import GPT
from gptmill.models.kernels.cublaslt import has_library
from gptmill.models.kernels.custom_ops import register_custom_ops
from gptmill.models.kernels.gemm_pass import build_gemm_pass

CAPABILITY = (8, 0)
# With small micro-batches a card waits for the host to start the blocks' kernels, each of which has work in proportion
# to the tokens times the square of the width. Beside an H200 the host was the slower one at 0.5e10 (GPT-2 124M by 8
# windows: 188 ms for 131 ms of kernels) and at 1.7e10 (enwik8: 1.05 M tokens/s, recorded 1.29 M); at 1.9e10
# (books-124m-modern) the card was at the limit of its power.
LEAST_WORK = 1.8e10
FORMATS = ("bf16", "fp8")
OPAQUE = (
    "gptmill::dropout_mask",
    "gptmill::fp8_linear_cross_entropy",
    "gptmill::linear_cross_entropy",
    "gptmill::gemm",
    "gptmill::gemm_gelu",
    "gptmill::gemm_dgelu",
    "gptmill::gemm_fp32",
)


def is_small(tokens: int, width: int) -> bool:
    """Whether a GPU is faster with a micro-batch of so many tokens than a host that starts its kernels one by one."""
    return tokens * width**2 < LEAST_WORK


def use_kernels(
    model: GPT, wanted: KernelChoice, device: torch.device, precision: PrecisionName, *, host_keeps_up: bool
) -> KernelChoice:
    """Makes a model that is about to train use those that win; returns which."""
    if wanted == "none" or precision not in FORMATS or not has_kernels(device):
        return "none"
    return fuse(model, wanted if host_keeps_up else "head")


def has_kernels(device: torch.device) -> bool:
    """Whether the device and what is installed can run them."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def prepare_compiler() -> None:
    """Tells torch.compile of the operations.

    One that it does not look into, and met unprepared, it would describe with every input in full, and that input's
    inputs, to a log that nobody reads: after a dozen layers this text has no end. And it keeps what it made of all of
    them under their names: with this tag, not for longer than their code stays the same.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    register_custom_ops()
    FALLBACK_ALLOW_LIST.update(OPAQUE)
    files = sorted(Path(__file__).parent.glob("*.py"))
    code = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    torch.compiler.config.cache_key_tag = f"gptmill {code}"


def list_kernel_options(used: KernelChoice, mode: CompileMode) -> dict[str, Any]:
    """Options for torch.compile: matmuls in their fastest way, unless it is to look for that itself."""
    is_left_to_torch = mode.startswith("max-autotune") or torch.are_deterministic_algorithms_enabled()
    if used != "auto" or is_left_to_torch or not has_library():
        return {}
    return {"post_grad_custom_post_pass": build_gemm_pass()}


def describe_kernels(model: GPT) -> str:
    """For people; empty where there are none."""
    return "all kernels" if model.fused else "the head's kernel" if model.fused_head else ""


def fuse(model: GPT, wanted: KernelChoice) -> KernelChoice:
    """Makes the head use its kernel, and the blocks theirs if wanted."""
    model.fused_head = True
    if wanted == "head":
        return "head"
    for part in model.modules():
        if hasattr(part, "fused"):
            part.fused = True  # type: ignore[assignment]
        if isinstance(part, Mlp):
            # Of a matmul that also does GELU, both results would be kept.
            part.leaves_gelu = model.recompute != "selective"
    return "auto"
