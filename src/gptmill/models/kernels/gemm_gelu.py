"""A GELU feed-forward part whose GEMMs compute GELU and its gradient in their epilogues.

An epilogue is what a GEMM does with its sums while they are still in registers, before it stores them.

**What is fused.** h = x @ w_up.T + b and a = gelu(h) are one GEMM with cuBLASLt's epilogue GELU_AUX_BIAS, which stores
a and, as its auxiliary output, h. Backward, dh = (g @ w_down) * gelu'(h) is one GEMM with the epilogue DGELU,
which reads h and stores dh. Otherwise GELU reads and writes N x F operands in a pass of its own each way, and its
backward pass reads two such matrices: about 10 N F bytes in bf16 saved for 2 N F more written forward.

**Formulas.** y = a @ w_down.T. With g = dL/dy:
    dh = (g @ w_down) * gelu'(h),  db = sum of dh over tokens
    d w_up = dh.T @ x,  d w_down = g.T @ a,  dx = dh @ w_up
GELU (Hendrycks and Gimpel 2016) is the tanh approximation, as in GPT-2. The epilogues are those of cublasLt.h
(CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU).

The first GEMM may run in fp8 (the input then comes in both formats); the others do not.

Shape suffixes: B batch, T sequence, N = B x T tokens, C channels, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.kernels.cublaslt import Epilogue, Operands
from gptmill.models.kernels.custom_ops import define_opaque_op
from gptmill.models.kernels.fp8 import Fp8Input, ScaledTensor, quantize_fp8, scaled_gemm
from gptmill.models.kernels.gemm import gemm_reference, tuned_gemm


def gelu_feed_forward(x_BTC: Tensor, up_FC: Tensor, bias_F: Tensor, down_CF: Tensor, x_fp8: Fp8Input) -> Tensor:
    """The feed-forward part in x's dtype, without the last layer's bias."""
    y_NC: Tensor = _GeluFeedForward.apply(x_BTC.flatten(0, 1), up_FC, bias_F, down_CF, *x_fp8)  # type: ignore[no-untyped-call]
    return y_NC.view_as(x_BTC)


class _GeluFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, up_FC: Tensor, bias_F: Tensor, down_CF: Tensor, fp8_NC: Tensor | None,
        inverse_scale: Tensor | None, emulated: bool,
    ) -> Tensor:  # fmt: skip
        dtype, ctx.bias_dtype = x_NC.dtype, bias_F.dtype
        bias_F = bias_F.to(dtype)
        if fp8_NC is None or inverse_scale is None:
            y_NF, hidden_NF = torch.ops.gptmill.gemm_gelu(x_NC, up_FC.to(dtype).t(), bias_F, None, None)
        else:
            weight = quantize_fp8(up_FC, torch.float8_e4m3fn)
            if emulated:
                hidden_NF = scaled_gemm(ScaledTensor(fp8_NC, inverse_scale), weight, dtype, emulated, bias_N=bias_F)
                y_NF = F.gelu(hidden_NF, approximate="tanh")
            else:
                scales = inverse_scale, weight.inverse_scale
                y_NF, hidden_NF = torch.ops.gptmill.gemm_gelu(fp8_NC, weight.fp8.t(), bias_F, *scales)
        ctx.save_for_backward(x_NC, up_FC, down_CF, hidden_NF, y_NF)
        result_NC: Tensor = y_NF @ down_CF.to(dtype).t()
        return result_NC

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, up_FC, down_CF, hidden_NF, y_NF = ctx.saved_tensors
        dtype = grad_NC.dtype
        d_hidden_NF = torch.ops.gptmill.gemm_dgelu(grad_NC, down_CF.to(dtype), hidden_NF)
        d_bias_F = d_hidden_NF.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        d_up_FC = (d_hidden_NF.t() @ x_NC).to(up_FC.dtype)
        d_down_CF = (grad_NC.t() @ y_NF).to(down_CF.dtype)
        return d_hidden_NF @ up_FC.to(dtype), d_up_FC, d_bias_F, d_down_CF, None, None, None


def gemm_gelu(
    x_NC: Tensor, weight_CF: Tensor, bias_F: Tensor, scale_x: Tensor | None, scale_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """gelu(x @ weight + bias), and its argument; operands in fp8 come with their inverse scales."""
    hidden_NF = bias_F.new_empty(x_NC.shape[0], weight_CF.shape[1])
    operands = Operands(x_NC, weight_CF, bias_F, scale_x, scale_weight, hidden_NF)
    y_NF = tuned_gemm(
        operands,
        Epilogue.GELU_AUX_BIAS,
        use_fast_accum=scale_x is not None,
        plain=lambda: gemm_gelu_reference(operands),
    )
    return gemm_gelu_reference(operands) if y_NF is None else (y_NF, hidden_NF)


def gemm_gelu_reference(operands: Operands) -> tuple[Tensor, Tensor]:
    """Reference implementation."""
    hidden_NF = gemm_reference(operands, use_fast_accum=operands.scale_a is not None)
    return F.gelu(hidden_NF, approximate="tanh"), hidden_NF


def gemm_dgelu(grad_NC: Tensor, weight_CF: Tensor, hidden_NF: Tensor) -> Tensor:
    """The gradient of GELU's argument; `grad @ weight` is the gradient of its result."""
    operands = Operands(grad_NC, weight_CF, aux=hidden_NF)
    d_hidden_NF = tuned_gemm(operands, Epilogue.DGELU)
    return gemm_dgelu_reference(operands) if d_hidden_NF is None else d_hidden_NF


def gemm_dgelu_reference(operands: Operands) -> Tensor:
    """Reference implementation."""
    assert operands.aux is not None
    grad_NF = gemm_reference(operands)
    d_hidden_NF: Tensor = torch.ops.aten.gelu_backward(grad_NF, operands.aux, approximate="tanh")
    return d_hidden_NF


define_opaque_op(
    "gemm_gelu(Tensor x, Tensor weight, Tensor bias, Tensor? scale_x, Tensor? scale_weight) -> (Tensor, Tensor)",
    gemm_gelu,
    lambda x, _weight, bias, *_: tuple(bias.new_empty(x.shape[0], bias.shape[0]) for _ in range(2)),
)
define_opaque_op(
    "gemm_dgelu(Tensor grad, Tensor weight, Tensor hidden) -> Tensor",
    gemm_dgelu,
    lambda _grad, _weight, hidden: hidden.new_empty(hidden.shape),
)
