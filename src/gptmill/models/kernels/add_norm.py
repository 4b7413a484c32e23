"""Residual add and norm in one pass: the end of one part of a block and the beginning of the next.

A block computes r = x + dropout(y + b) and then norm(r), where y is the last GEMM's result without its bias. The op
does both: the pass that reads x and y writes r and norm(r). `add_norm_triton.py` has the formulas and counts the bytes.
The backward pass returns the gradients of x and y and, summed up on the way, those of the norm's
weight and bias and of b. Only r and each row's mean and 1 / deviation are kept for it.

Where the next GEMM runs in fp8, the same pass also writes norm(r) quantized. Its scale follows from the weights alone.

Shape suffixes: N tokens, C channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gptmill.models.kernels.custom_ops import make_custom_op
from gptmill.models.kernels.fp8 import TINIEST_AMAX, ScaledTensor

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def add_norm(
    x_BTC: Tensor, y_BTC: Tensor, y_bias_C: Tensor | None, dropout_mask_BTC: Tensor | None,
    dropout_scale: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, eps: float, *, is_rms: bool,
    with_fp8: bool = False,
) -> tuple[Tensor, Tensor, ScaledTensor | None]:  # fmt: skip
    """The residual sum of x and y, and its LayerNorm or RMSNorm, in x's dtype; the norm also in e4m3 if asked."""
    x_NC, y_NC = x_BTC.flatten(0, -2), y_BTC.flatten(0, -2)
    mask_NC = None if dropout_mask_BTC is None else dropout_mask_BTC.flatten(0, -2)
    residual_NC, normed_NC, fp8_NC, inverse_scale, _, _ = _add_norm(
        x_NC, y_NC, y_bias_C, mask_NC, dropout_scale, weight_C, bias_C, eps, is_rms, with_fp8
    )
    scaled = ScaledTensor(fp8_NC, inverse_scale) if with_fp8 else None
    return residual_NC.view_as(x_BTC), normed_NC.view_as(x_BTC), scaled


@make_custom_op("add_norm")
def _add_norm(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, mask_NC: Tensor | None, scale: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, with_fp8: bool,
) -> Results:  # fmt: skip
    if x_NC.device.type != "cuda":
        return add_norm_reference(x_NC, y_NC, y_bias_C, mask_NC, scale, weight_C, bias_C, eps, is_rms, with_fp8)
    from gptmill.models.kernels.add_norm_triton import run_forward

    mask_NC = None if mask_NC is None else mask_NC.contiguous()
    return run_forward(
        x_NC.contiguous(), y_NC.contiguous(), y_bias_C, mask_NC, scale, weight_C, bias_C, eps, is_rms, with_fp8
    )


def add_norm_reference(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, mask_NC: Tensor | None, scale: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, with_fp8: bool,
) -> Results:  # fmt: skip
    """Reference implementation of the forward pass."""
    added_NC = y_NC.float() if y_bias_C is None else y_NC.float() + y_bias_C.float()
    added_NC = added_NC if mask_NC is None or scale is None else added_NC * (mask_NC * scale)
    residual_NC = (x_NC.float() + added_NC).to(x_NC.dtype)
    r_NC = residual_NC.float()
    mean_N = r_NC.new_zeros(len(r_NC)) if is_rms else r_NC.mean(dim=-1)
    centered_NC = r_NC - mean_N[:, None]
    rstd_N = (centered_NC.square().mean(dim=-1) + eps).rsqrt()
    normed_NC = centered_NC * rstd_N[:, None] * weight_C.float()
    if bias_C is not None:
        normed_NC = normed_NC + bias_C.float()
    mean_N = mean_N[:0].clone() if is_rms else mean_N
    limit = weight_C.float().abs() * math.sqrt(len(weight_C))
    limit = (limit if bias_C is None else limit + bias_C.float().abs()).amax().clamp(min=TINIEST_AMAX)
    largest = torch.finfo(torch.float8_e4m3fn).max
    fp8_NC = (normed_NC * (largest / limit)).clamp(-largest, largest).to(torch.float8_e4m3fn)
    inverse_scale = limit / largest
    if not with_fp8:
        fp8_NC, inverse_scale = fp8_NC[:0].clone(), inverse_scale.new_empty(0)
    return residual_NC, normed_NC.to(x_NC.dtype), fp8_NC, inverse_scale, mean_N, rstd_N


@_add_norm.register_fake
def _(x: Tensor, *others: Any) -> Results:
    *_, is_rms, with_fp8 = others
    rows = x.new_empty(len(x), dtype=torch.float32)
    mean = x.new_empty(0, dtype=torch.float32) if is_rms else torch.empty_like(rows)
    fp8 = x.new_empty((len(x) if with_fp8 else 0, x.shape[1]), dtype=torch.float8_e4m3fn)
    return x.new_empty(x.shape), x.new_empty(x.shape), fp8, rows.new_empty(() if with_fp8 else 0), mean, rows


@make_custom_op("add_norm_backward")
def _add_norm_backward(
    d_residual_NC: Tensor, d_normed_NC: Tensor, residual_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    mask_NC: Tensor | None, scale: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if residual_NC.device.type != "cuda":
        return add_norm_backward_reference(
            d_residual_NC, d_normed_NC, residual_NC, mean_N, rstd_N, mask_NC, scale, weight_C, is_rms
        )
    from gptmill.models.kernels.add_norm_triton import run_backward

    d_residual_NC, d_normed_NC, residual_NC = (
        d_residual_NC.contiguous(),
        d_normed_NC.contiguous(),
        residual_NC.contiguous(),
    )
    mask_NC = None if mask_NC is None else mask_NC.contiguous()
    return run_backward(d_residual_NC, d_normed_NC, residual_NC, mean_N, rstd_N, mask_NC, scale, weight_C, is_rms)


def add_norm_backward_reference(
    d_residual_NC: Tensor, d_normed_NC: Tensor, residual_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    mask_NC: Tensor | None, scale: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Reference implementation of the backward pass.

    The gradient of x; that of y, empty without dropout, since it is then x's; and the sums over rows: the gradients of
    the norm's weight, of its bias and of y's bias.
    """
    r_NC, d_wide_NC = residual_NC.float(), d_normed_NC.float()
    hat_NC = (r_NC if is_rms else r_NC - mean_N[:, None]) * rstd_N[:, None]
    d_hat_NC = d_wide_NC * weight_C.float()
    centered_NC = d_hat_NC - hat_NC * (hat_NC * d_hat_NC).mean(dim=-1, keepdim=True)
    if not is_rms:
        centered_NC = centered_NC - d_hat_NC.mean(dim=-1, keepdim=True)
    dx_NC = d_residual_NC.float() + centered_NC * rstd_N[:, None]
    dy_NC = dx_NC if mask_NC is None or scale is None else dx_NC * (mask_NC * scale)
    sums_3C = torch.stack([d_wide_NC * hat_NC, d_wide_NC, dy_NC]).sum(dim=1)
    dy_NC = dy_NC.to(residual_NC.dtype) if mask_NC is not None else residual_NC.new_empty(0, residual_NC.shape[1])
    return dx_NC.to(residual_NC.dtype), dy_NC, sums_3C


@_add_norm_backward.register_fake
def _(
    d_residual: Tensor, d_normed: Tensor, residual: Tensor, mean: Tensor, rstd: Tensor, mask: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = residual.shape
    dy = residual.new_empty(0 if mask is None else rows, width)
    return residual.new_empty(rows, width), dy, residual.new_empty(3, width, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    _x, y, y_bias, mask, scale, weight, bias, _eps, is_rms, _with_fp8 = inputs
    residual, _normed, *fp8, mean, rstd = output
    ctx.save_for_backward(residual, mean, rstd, mask, scale, weight)
    ctx.mark_non_differentiable(*fp8, mean, rstd)
    ctx.y_dtype, ctx.has_y_bias, ctx.has_bias, ctx.is_rms = y.dtype, y_bias is not None, bias is not None, is_rms


def _backward(ctx: Any, d_residual: Tensor, d_normed: Tensor, *_: Any) -> tuple[Any, ...]:
    residual, mean, rstd, mask, scale, weight = ctx.saved_tensors
    dx, dy, sums = _add_norm_backward(d_residual, d_normed, residual, mean, rstd, mask, scale, weight, ctx.is_rms)
    dy = (dx if mask is None else dy).to(ctx.y_dtype)
    d_weight, d_bias, dy_sum = sums.unbind()
    d_y_bias, d_bias = dy_sum if ctx.has_y_bias else None, d_bias if ctx.has_bias else None
    return dx, dy, d_y_bias, None, None, d_weight, d_bias, None, None, None


_add_norm.register_autograd(_backward, setup_context=_save_for_backward)
