"""Probes of arithmetic on one device: matmuls in each precision, each attention backend, a Triton kernel of ours.

Each runs once and is compared with the same in fp32. They run in a child process; what they raise is their result.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptmill.models.kernels.swiglu import swiglu, swiglu_backward_reference
from gptmill.runtime.precision import is_slow

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SIZE = 256
LIMIT = 0.03  # relative, in the 2-norm: rounding to bf16 is ten times smaller, a broken kernel far larger


def multiply(device: str, precision: str) -> float:
    """The relative error of a matmul whose operands have been rounded to the precision."""
    dtype = DTYPES[precision]
    a, b = (_draw((SIZE, SIZE), device, seed).to(dtype) for seed in (0, 1))
    if precision == "fp8":
        one = torch.ones((), device=device)
        product = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        product = a @ b.t()
    return _compare(product, a.double() @ b.double().t())


def attend(device: str, backend: str) -> float:
    """The largest relative error of causal attention and of its gradients, in this backend alone."""
    has_bf16 = device == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    inputs = [_draw((2, 4, 128, 64), device, seed).to(dtype) for seed in range(4)]
    found = _differentiate(inputs, BACKENDS[backend])
    exact = _differentiate([each.float() for each in inputs], SDPBackend.MATH)
    return max(_compare(each, reference) for each, reference in zip(found, exact, strict=True))


def run_kernel(device: str) -> float:
    """The relative error of our Triton kernel for SwiGLU's gradient, compiled anew."""
    with tempfile.TemporaryDirectory(prefix="gptmill-doctor-") as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        x = _draw((64, 512), device, 0).bfloat16().requires_grad_()
        gradient = _draw((64, 256), device, 1).bfloat16()
        swiglu(x).backward(gradient)
        assert x.grad is not None
        return _compare(x.grad, swiglu_backward_reference(gradient.float(), x.detach().float()))


def emulates_bf16() -> bool:
    """Whether this CPU has no instructions for bf16 and is far slower in it than in fp32."""
    return is_slow("bf16", torch.device("cpu"))


def _differentiate(inputs: list[Tensor], backend: SDPBackend) -> list[Tensor]:
    """The output of attention and the gradients of queries, keys and values."""
    q, k, v = (each.detach().requires_grad_() for each in inputs[:3])
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(output, (q, k, v), inputs[3])
    return [output.detach(), *gradients]


def _draw(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _compare(found: Tensor, exact: Tensor) -> float:
    """Raises RuntimeError if the relative error is too large, or not a number."""
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    if not error <= LIMIT:
        raise RuntimeError(
            f"the result is wrong: its relative error is {error:.3g}, and more than {LIMIT} is no rounding"
        )
    return error
