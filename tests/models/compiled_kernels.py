"""Compiles every Triton kernel for GPUs that need not be present, and prints the kernels' names.

The compiler refuses some code that the interpreter accepts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gptmill.models.kernels import (
    accumulate_triton,
    add_norm_triton,
    bias_gelu_triton,
    bucket_count_triton,
    decode_attention_triton,
    dropout_mask_triton,
    linear_cross_entropy_triton,
    qkv_projection_triton,
    swiglu_triton,
    transpose_triton,
)
from gptmill.models.kernels.bias_gelu import CUBE, SLOPE

BF16 = torch.bfloat16
launch = JITFunction.run
compiled: dict[str, None] = {}


class Driver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are cached by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_only(kernel: Any, *arguments: Any, **options: Any) -> Any:
    compiled[kernel.fn.__name__] = None
    return launch(kernel, *arguments, **{**options, "warmup": True})


def compile_all(width: int, *, with_fp8: bool) -> None:
    """Calls every function that launches a kernel, with rows of `width` elements."""
    x, y, d_residual, d_normed = torch.zeros(4, 32, width, dtype=BF16)
    weight, bias, rows = torch.ones(width), torch.zeros(width), torch.zeros(32)
    mask_and_scale = (torch.ones(32, width, dtype=torch.bool), torch.tensor(1.25))
    for is_rms in (False, True):
        for dropout in ((None, None), mask_and_scale):
            for y_bias in (None, bias):
                more = (None if is_rms else bias, 1e-5, is_rms, with_fp8)
                add_norm_triton.run_forward(x, y, y_bias, *dropout, weight, *more)
            add_norm_triton.run_backward(d_residual, d_normed, x, rows, rows, *dropout, weight, is_rms)
    bias_gelu_triton.run_backward(x, y, bias, SLOPE, CUBE)
    swiglu_triton.run_backward(x[:, : width // 2].contiguous(), y)
    accumulate_triton.run_accumulate(bias, bias.bfloat16())
    logits, targets = torch.zeros(32, width, dtype=BF16), torch.zeros(32, dtype=torch.int64)
    for gradient in (None, logits, *([logits.to(torch.float8_e5m2)] if with_fp8 else [])):
        for vocab_size in (width, width - 7):
            linear_cross_entropy_triton.run_cross_entropy(logits, targets, -100, gradient, 1.0, vocab_size)
    heads, angles = torch.zeros(2, 16, width // 32, 32, dtype=BF16), torch.zeros(16, 32)
    for rope in ((None, None, True), (angles, angles, False), (angles, angles, True)):
        qkv_projection_triton.run_pack(heads, heads, heads, *rope)
    compile_decode_attention()
    transpose_triton.run_transpose(torch.zeros(64, width, dtype=torch.uint8))
    dropout_mask_triton.run_dropout_mask(1000, 0.1, torch.tensor(1))
    for dtype in (torch.float32, BF16):
        bucket_count_triton.run_count_buckets(torch.zeros(32, width, dtype=dtype), -40, 2, 96)


def compile_decode_attention() -> None:
    rows, heads, kv_heads, head_size, splits = 2, 8, 2, 64, 4
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * head_size, dtype=BF16)
    keys, values = torch.zeros(2, rows, kv_heads, 64, head_size, dtype=BF16)
    result, positions = torch.zeros(rows, heads, head_size, dtype=BF16), torch.zeros(rows, dtype=torch.int64)
    angles, weight = torch.zeros(64, head_size), torch.zeros(head_size)
    parts = torch.zeros(rows * heads * splits * (head_size + 2))
    counters = torch.zeros(rows * kv_heads, dtype=torch.int32)
    for more in ((None, None), ((angles, angles), (weight, weight, 1e-5))):
        decode_attention_triton.run_decode_attention(
            qkv, keys, values, positions, result, None, *more, parts, counters, splits
        )


if __name__ == "__main__":
    JITFunction.run = compile_only
    for capability in (80, 90):
        driver.set_active(Driver(capability))
        for width in (768, 1600):
            compile_all(width, with_fp8=capability >= 89)
    sys.stdout.write("".join(f"{name.removesuffix('_kernel')}\n" for name in sorted(compiled)))
