"""A feed-forward part with GELU, whose matmuls do GELU's work, forward and backward, before they store their sums.

B batch, T time, N = B x T tokens, C width, F width inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.models.fp8 import Scaled, find_fp8_input, multiply, scale_to_fp8
from gptmill.models.kernels.cublaslt import Epilogue, Operands
from gptmill.models.kernels.custom_ops import define_opaque_op
from gptmill.models.kernels.gemm import gemm_reference, tuned_gemm
from gptmill.models.stream import Normed


def gelu_feed_forward(normed: Normed, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Without the last layer's bias. Under autocast in its format."""
    kind = normed.x_BTC.device.type
    x_BTC = normed.x_BTC.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed.x_BTC
    x_NC = x_BTC.flatten(0, 1)
    narrow = find_fp8_input(up, x_NC, normed.narrow)
    y_NC: Tensor = _GeluFeedForward.apply(x_NC, up.weight, up.bias, down.weight, *narrow)  # type: ignore[no-untyped-call]
    return y_NC.view_as(x_BTC)


class _GeluFeedForward(torch.autograd.Function):
    """The first layer may be in fp8, and x then comes in both formats; the rest is not."""

    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, up_FC: Tensor, bias_F: Tensor, down_CF: Tensor, narrow_NC: Tensor | None,
        inverse_scale: Tensor | None, emulated: bool,
    ) -> Tensor:  # fmt: skip
        dtype, ctx.bias_dtype = x_NC.dtype, bias_F.dtype
        bias_F = bias_F.to(dtype)
        if narrow_NC is None or inverse_scale is None:
            y_NF, inner_NF = torch.ops.gptmill.gemm_gelu(x_NC, up_FC.to(dtype).t(), bias_F, None, None)
        else:
            weight = scale_to_fp8(up_FC, torch.float8_e4m3fn)
            if emulated:
                inner_NF = multiply(Scaled(narrow_NC, inverse_scale), weight, dtype, emulated, bias_N=bias_F)
                y_NF = F.gelu(inner_NF, approximate="tanh")
            else:
                scales = inverse_scale, weight.inverse_scale
                y_NF, inner_NF = torch.ops.gptmill.gemm_gelu(narrow_NC, weight.fp8.t(), bias_F, *scales)
        ctx.save_for_backward(x_NC, up_FC, down_CF, inner_NF, y_NF)
        result_NC: Tensor = y_NF @ down_CF.to(dtype).t()
        return result_NC

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, up_FC, down_CF, inner_NF, y_NF = ctx.saved_tensors
        dtype = grad_NC.dtype
        d_inner_NF = torch.ops.gptmill.gemm_dgelu(grad_NC, down_CF.to(dtype), inner_NF)
        d_bias_F = d_inner_NF.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        d_up_FC = (d_inner_NF.t() @ x_NC).to(up_FC.dtype)
        d_down_CF = (grad_NC.t() @ y_NF).to(down_CF.dtype)
        return d_inner_NF @ up_FC.to(dtype), d_up_FC, d_bias_F, d_down_CF, None, None, None


def gemm_gelu(
    x_NC: Tensor, weight_CF: Tensor, bias_F: Tensor, scale_x: Tensor | None, scale_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """GELU of `x @ weight` plus a bias, and what goes into it; of numbers in fp8 each matrix has a scale."""
    inner_NF = bias_F.new_empty(x_NC.shape[0], weight_CF.shape[1])
    numbers = Operands(x_NC, weight_CF, bias_F, scale_x, scale_weight, inner_NF)
    y_NF = tuned_gemm(
        numbers,
        Epilogue.GELU_AUX_BIAS,
        use_fast_accum=scale_x is not None,
        plain=lambda: gemm_gelu_reference(numbers),
    )
    return gemm_gelu_reference(numbers) if y_NF is None else (y_NF, inner_NF)


def gemm_gelu_reference(numbers: Operands) -> tuple[Tensor, Tensor]:
    """The twin."""
    inner_NF = gemm_reference(numbers, use_fast_accum=numbers.scale_a is not None)
    return F.gelu(inner_NF, approximate="tanh"), inner_NF


def gemm_dgelu(grad_NC: Tensor, weight_CF: Tensor, inner_NF: Tensor) -> Tensor:
    """The gradient of what went into GELU; `grad @ weight` is that of what came out."""
    numbers = Operands(grad_NC, weight_CF, aux=inner_NF)
    d_inner_NF = tuned_gemm(numbers, Epilogue.DGELU)
    return gemm_dgelu_reference(numbers) if d_inner_NF is None else d_inner_NF


def gemm_dgelu_reference(numbers: Operands) -> Tensor:
    """The twin."""
    assert numbers.aux is not None
    grad_NF = gemm_reference(numbers)
    d_inner_NF: Tensor = torch.ops.aten.gelu_backward(grad_NF, numbers.aux, approximate="tanh")
    return d_inner_NF


define_opaque_op(
    "gemm_gelu(Tensor x, Tensor weight, Tensor bias, Tensor? scale_x, Tensor? scale_weight) -> (Tensor, Tensor)",
    gemm_gelu,
    lambda x, _weight, bias, *_: tuple(bias.new_empty(x.shape[0], bias.shape[0]) for _ in range(2)),
)
define_opaque_op(
    "gemm_dgelu(Tensor grad, Tensor weight, Tensor inner) -> Tensor",
    gemm_dgelu,
    lambda _grad, _weight, inner: inner.new_empty(inner.shape),
)
