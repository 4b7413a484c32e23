"""Bias and GELU, with a backward pass that also sums up the bias's gradient.

GELU (Hendrycks & Gimpel 2016) in its tanh approximation, of v = x + bias:

    gelu(v) = v * (1 + tanh(u)) / 2,  u = sqrt(2 / pi) * (v + 0.044715 v^3)
            = v * sigmoid(2u)

since (1 + tanh(u)) / 2 is the logistic function of 2u, which is cheaper. With s = sigmoid(2u), the gradient is

    dx = d_y * (s + v * s * (1 - s) * 2 sqrt(2 / pi) * (1 + 3 * 0.044715 v^2)),   d_bias = sum of dx over tokens

The forward pass is elementwise, and torch.compile fuses it. It saves x and the bias alone; the backward pass computes v
and s again.

Shape suffixes: N tokens, F feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gptmill.models.casting import cast
from gptmill.models.kernels.custom_ops import make_custom_op

SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)
CUBE = 0.044715


def bias_gelu(x: Tensor, bias_F: Tensor) -> Tensor:
    """GELU (tanh) of x + bias, computed in fp32 and returned in x's dtype."""
    result: Tensor = _BiasGelu.apply(x, bias_F)  # type: ignore[no-untyped-call]
    return result


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_F: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias_F)
        biased = x.float() + bias_F.float()
        return cast(biased * torch.sigmoid(SLOPE * (biased + CUBE * biased**3)), x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, bias_F = ctx.saved_tensors
        dx, d_bias_F = _gelu_backward(d_y.flatten(0, -2), x.flatten(0, -2), bias_F)
        return dx.view_as(x), d_bias_F.to(bias_F.dtype)


@make_custom_op("bias_gelu_backward")
def _gelu_backward(d_y_NF: Tensor, x_NF: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    if x_NF.device.type != "cuda":
        return gelu_backward_reference(d_y_NF, x_NF, bias_F)
    from gptmill.models.kernels.bias_gelu_triton import run_backward

    return run_backward(d_y_NF.contiguous(), x_NF.contiguous(), bias_F, SLOPE, CUBE)


def gelu_backward_reference(d_y_NF: Tensor, x_NF: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation: the gradients of x and, in fp32, of the bias."""
    x = x_NF.float() + bias_F.float()
    gate = torch.sigmoid(SLOPE * (x + CUBE * x**3))
    dx = d_y_NF.float() * (gate + x * gate * (1 - gate) * SLOPE * (1 + 3 * CUBE * x * x))
    return dx.to(x_NF.dtype), dx.sum(dim=0)


@_gelu_backward.register_fake
def _(d_y: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape, dtype=torch.float32)
