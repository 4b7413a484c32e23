"""GEMMs in fp8 with dynamic per-tensor scaling, on PyTorch alone.

**Format.** An fp8 number has 8 bits: e4m3 spends 4 on the exponent (largest value 448) and 3 on the mantissa, e5m2
spends 5 and 2 (largest 57,344). Weights and activations use e4m3, which is more precise; gradients use e5m2, which has
the wider range (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

**Quantization.** A tensor x is stored as q = round(x * s) with one scale s = largest / max|x| for the whole tensor, so
that its largest element becomes the format's largest. The GEMM multiplies the q's on tensor cores at twice the bf16
rate, accumulates in fp32, and multiplies the sums by 1 / (s_a * s_b): that is what `torch._scaled_mm` takes
`scale_a` and `scale_b` for. The inverse scale travels beside the tensor (`ScaledTensor`).

**Layout.** The hardware multiplies fp8 only along the contiguous dimension of both operands (a row-major, b
column-major), hence `a @ b.T` of two row-major matrices here, and a transposed copy wherever the gradients need the
other orientation.

**Gradients** of y = x @ w.T, with g = dL/dy: dx = g @ w and dw = g.T @ x. `_Fp8Linear` computes all three GEMMs in fp8
and keeps only the quantized x and w for the backward pass: half the bytes of bf16. `_Fp8Forward` quantizes the forward
GEMM alone: its gradients are those of bf16. The cast then pays where the pass that produces x also writes it in fp8
(kernel fusion), so that no extra pass over memory is needed; see `add_norm`.

Forward GEMMs use fast accumulation (partial sums of fewer bits); gradients need the precise one.

Shape suffixes: M rows, K inner dimension, N columns of the result.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.casting import cast

Fp8Format = Literal["fp8", "fp8-emulated"]
TILE = 16
TINIEST_AMAX = 1e-30  # its scale and the inverse of that are still finite in fp32


class ScaledTensor(NamedTuple):
    """An fp8 tensor, and the factor that turns it back into the values it stands for."""

    fp8: Tensor
    inverse_scale: Tensor


class Fp8Input(NamedTuple):
    """A layer's input in fp8, where the layer multiplies so; None and None otherwise."""

    fp8_MK: Tensor | None
    inverse_scale: Tensor | None
    emulated: bool


def fp8_linear(
    x: Tensor, weight_NK: Tensor, emulated: bool, *, forward_only: bool = False, x_fp8: ScaledTensor | None = None
) -> Tensor:
    """`x @ weight.T` in fp8 where the shapes fit fp8's tiles, and in x's dtype otherwise.

    A sampled token or the last rows of a validation set do not fill a tile, and are too few to gain from fp8.
    `x_fp8` is x quantized already, where the pass before has done so.
    """
    kind = x.device.type
    x_MK = x.flatten(0, -2)
    if not fits_tiles(x_MK, weight_NK):
        return F.linear(x, weight_NK)
    if torch.is_autocast_enabled(kind):
        x_MK = x_MK.to(torch.get_autocast_dtype(kind))
    if forward_only:
        x_fp8 = x_fp8 or quantize_fp8(x_MK.detach(), torch.float8_e4m3fn)
        y_MN: Tensor = _Fp8Forward.apply(x_MK, weight_NK, *x_fp8, emulated)  # type: ignore[no-untyped-call]
    else:
        y_MN = _Fp8Linear.apply(x_MK, weight_NK, emulated)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], len(weight_NK))


def fits_tiles(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether all three dimensions are multiples of fp8's tile."""
    return not any(size % TILE for size in (*x_MK.shape, len(weight_NK)))


def quantize_fp8(x: Tensor, dtype: torch.dtype) -> ScaledTensor:
    """Scales x by one factor so that its largest element becomes the format's largest. NaN and infinity become NaN."""
    limit = torch.finfo(dtype).max
    scale = limit / x.abs().amax().float().clamp(min=TINIEST_AMAX)
    # The clamp is for rounding: what ends up beyond the limit would become NaN or infinity.
    return ScaledTensor((x.float() * scale).clamp(-limit, limit).to(dtype).contiguous(), scale.reciprocal())


def scaled_gemm(
    a_MK: ScaledTensor,
    b_NK: ScaledTensor,
    dtype: torch.dtype,
    emulated: bool,
    is_gradient: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """`a @ b.T`, plus a bias; both operands are row-major."""
    if emulated:
        product_MN = emulated_scaled_gemm(a_MK, b_NK)
        return cast(product_MN if bias_N is None else product_MN + bias_N, dtype)
    return torch._scaled_mm(
        a_MK.fp8,
        b_NK.fp8.t(),
        scale_a=a_MK.inverse_scale,
        scale_b=b_NK.inverse_scale,
        bias=None if bias_N is None else bias_N.to(dtype),
        out_dtype=dtype,
        use_fast_accum=not is_gradient,
    )


def emulated_scaled_gemm(a_MK: ScaledTensor, b_NK: ScaledTensor) -> Tensor:
    """`a @ b.T` of the same quantized values, multiplied in fp32: runs on any device."""
    with torch.autocast(a_MK.fp8.device.type, enabled=False):
        product_MN = a_MK.fp8.float() @ b_NK.fp8.float().t()
    return product_MN * (a_MK.inverse_scale * b_NK.inverse_scale)


def _transpose(a_MK: ScaledTensor) -> ScaledTensor:
    return ScaledTensor(a_MK.fp8.t().contiguous(), a_MK.inverse_scale)


class _Fp8Linear(torch.autograd.Function):
    """All three GEMMs in fp8."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, emulated: bool) -> Tensor:
        x, weight = quantize_fp8(x_MK, torch.float8_e4m3fn), quantize_fp8(weight_NK, torch.float8_e4m3fn)
        ctx.save_for_backward(*x, *weight)
        ctx.emulated, ctx.weight_dtype = emulated, weight_NK.dtype
        return scaled_gemm(x, weight, x_MK.dtype, emulated)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
        x_MK, weight_NK = ScaledTensor(*saved[:2]), ScaledTensor(*saved[2:])
        grad = quantize_fp8(grad_MN, torch.float8_e5m2)
        grad_x_MK = scaled_gemm(grad, _transpose(weight_NK), grad_MN.dtype, ctx.emulated, is_gradient=True)
        grad_weight_NK = scaled_gemm(
            _transpose(grad), _transpose(x_MK), ctx.weight_dtype, ctx.emulated, is_gradient=True
        )
        return grad_x_MK, grad_weight_NK, None


class _Fp8Forward(torch.autograd.Function):
    """The forward GEMM in fp8; x comes in both formats, for the gradients are computed in its own."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, fp8_MK: Tensor, inverse_scale: Tensor, emulated: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        weight = quantize_fp8(weight_NK, torch.float8_e4m3fn)
        return scaled_gemm(ScaledTensor(fp8_MK, inverse_scale), weight, x_MK.dtype, emulated)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_MK, weight_NK = ctx.saved_tensors
        grad_x_MK = grad_MN @ weight_NK.to(grad_MN.dtype)
        return grad_x_MK, (grad_MN.t() @ x_MK).to(weight_NK.dtype), None, None, None
