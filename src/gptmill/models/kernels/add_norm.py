"""The end of one part of a block and the beginning of the next: dropout, a sum, and its norm.

N tokens, C width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gptmill.models.fp8 import TINIEST_AMAX, Scaled
from gptmill.models.kernels.custom_ops import make_custom_op
from gptmill.models.stream import Branch

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def add_norm(
    x_BTC: Tensor, branch: Branch, weight_C: Tensor, bias_C: Tensor | None, eps: float, *, is_rms: bool,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Scaled | None]:  # fmt: skip
    """The sum of x and the branch, and its layer norm or RMS norm. Both are in x's format, sums within are fp32's.

    The norm may be wanted in e4m3 too. Its largest number is not looked for: a norm of C numbers cannot exceed the
    root of C, so that the weights tell how large their product can be.
    """
    x_NC, y_NC = x_BTC.flatten(0, -2), branch.y_BTC.flatten(0, -2)
    keep_NC = None if branch.keep_BTC is None else branch.keep_BTC.flatten(0, -2)
    stream_NC, normed_NC, fp8_NC, inverse_scale, _, _ = _add_norm(
        x_NC, y_NC, branch.bias_C, keep_NC, branch.factor, weight_C, bias_C, eps, is_rms, narrow
    )
    scaled = Scaled(fp8_NC, inverse_scale) if narrow else None
    return stream_NC.view_as(x_BTC), normed_NC.view_as(x_BTC), scaled


@make_custom_op("add_norm")
def _add_norm(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, keep_NC: Tensor | None, factor: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, narrow: bool,
) -> Results:  # fmt: skip
    if x_NC.device.type != "cuda":
        return add_norm_reference(x_NC, y_NC, y_bias_C, keep_NC, factor, weight_C, bias_C, eps, is_rms, narrow)
    from gptmill.models.kernels.add_norm_triton import run_forward

    keep_NC = None if keep_NC is None else keep_NC.contiguous()
    return run_forward(
        x_NC.contiguous(), y_NC.contiguous(), y_bias_C, keep_NC, factor, weight_C, bias_C, eps, is_rms, narrow
    )


def add_norm_reference(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, keep_NC: Tensor | None, factor: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, narrow: bool,
) -> Results:  # fmt: skip
    """The twin. The norm's means are kept for the way back."""
    added_NC = y_NC.float() if y_bias_C is None else y_NC.float() + y_bias_C.float()
    added_NC = added_NC if keep_NC is None or factor is None else added_NC * (keep_NC * factor)
    stream_NC = (x_NC.float() + added_NC).to(x_NC.dtype)
    wide_NC = stream_NC.float()
    mean_N = wide_NC.new_zeros(len(wide_NC)) if is_rms else wide_NC.mean(dim=-1)
    away_NC = wide_NC - mean_N[:, None]
    rstd_N = (away_NC.square().mean(dim=-1) + eps).rsqrt()
    normed_NC = away_NC * rstd_N[:, None] * weight_C.float()
    if bias_C is not None:
        normed_NC = normed_NC + bias_C.float()
    mean_N = mean_N[:0].clone() if is_rms else mean_N
    limit = weight_C.float().abs() * math.sqrt(len(weight_C))
    limit = (limit if bias_C is None else limit + bias_C.float().abs()).amax().clamp(min=TINIEST_AMAX)
    largest = torch.finfo(torch.float8_e4m3fn).max
    fp8_NC = (normed_NC * (largest / limit)).clamp(-largest, largest).to(torch.float8_e4m3fn)
    inverse_scale = limit / largest
    if not narrow:
        fp8_NC, inverse_scale = fp8_NC[:0].clone(), inverse_scale.new_empty(0)
    return stream_NC, normed_NC.to(x_NC.dtype), fp8_NC, inverse_scale, mean_N, rstd_N


@_add_norm.register_fake
def _(x: Tensor, *others: Any) -> Results:
    *_, is_rms, narrow = others
    rows = x.new_empty(len(x), dtype=torch.float32)
    mean = x.new_empty(0, dtype=torch.float32) if is_rms else torch.empty_like(rows)
    fp8 = x.new_empty((len(x) if narrow else 0, x.shape[1]), dtype=torch.float8_e4m3fn)
    return x.new_empty(x.shape), x.new_empty(x.shape), fp8, rows.new_empty(() if narrow else 0), mean, rows


@make_custom_op("add_norm_backward")
def _add_norm_backward(
    d_stream_NC: Tensor, d_normed_NC: Tensor, stream_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    keep_NC: Tensor | None, factor: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if stream_NC.device.type != "cuda":
        return add_norm_backward_reference(
            d_stream_NC, d_normed_NC, stream_NC, mean_N, rstd_N, keep_NC, factor, weight_C, is_rms
        )
    from gptmill.models.kernels.add_norm_triton import run_backward

    d_stream_NC, d_normed_NC, stream_NC = d_stream_NC.contiguous(), d_normed_NC.contiguous(), stream_NC.contiguous()
    keep_NC = None if keep_NC is None else keep_NC.contiguous()
    return run_backward(d_stream_NC, d_normed_NC, stream_NC, mean_N, rstd_N, keep_NC, factor, weight_C, is_rms)


def add_norm_backward_reference(
    d_stream_NC: Tensor, d_normed_NC: Tensor, stream_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    keep_NC: Tensor | None, factor: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The twin: the gradients of x and, where some of it was dropped, of y: else x's is y's too, and the second result
    is empty. Then those of the norm's weight, its bias and y's bias."""
    wide_NC, d_wide_NC = stream_NC.float(), d_normed_NC.float()
    hat_NC = (wide_NC if is_rms else wide_NC - mean_N[:, None]) * rstd_N[:, None]
    d_hat_NC = d_wide_NC * weight_C.float()
    away_NC = d_hat_NC - hat_NC * (hat_NC * d_hat_NC).mean(dim=-1, keepdim=True)
    if not is_rms:
        away_NC = away_NC - d_hat_NC.mean(dim=-1, keepdim=True)
    dx_NC = d_stream_NC.float() + away_NC * rstd_N[:, None]
    dy_NC = dx_NC if keep_NC is None or factor is None else dx_NC * (keep_NC * factor)
    sums_3C = torch.stack([d_wide_NC * hat_NC, d_wide_NC, dy_NC]).sum(dim=1)
    dy_NC = dy_NC.to(stream_NC.dtype) if keep_NC is not None else stream_NC.new_empty(0, stream_NC.shape[1])
    return dx_NC.to(stream_NC.dtype), dy_NC, sums_3C


@_add_norm_backward.register_fake
def _(
    d_stream: Tensor, d_normed: Tensor, stream: Tensor, mean: Tensor, rstd: Tensor, keep: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = stream.shape
    dy = stream.new_empty(0 if keep is None else rows, width)
    return stream.new_empty(rows, width), dy, stream.new_empty(3, width, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    _x, y, y_bias, keep, factor, weight, bias, _eps, is_rms, _narrow = inputs
    stream, _normed, *narrow, mean, rstd = output
    ctx.save_for_backward(stream, mean, rstd, keep, factor, weight)
    ctx.mark_non_differentiable(*narrow, mean, rstd)
    ctx.y_dtype, ctx.has_y_bias, ctx.has_bias, ctx.is_rms = y.dtype, y_bias is not None, bias is not None, is_rms


def _go_back(ctx: Any, d_stream: Tensor, d_normed: Tensor, *_: Any) -> tuple[Any, ...]:
    stream, mean, rstd, keep, factor, weight = ctx.saved_tensors
    dx, dy, sums = _add_norm_backward(d_stream, d_normed, stream, mean, rstd, keep, factor, weight, ctx.is_rms)
    dy = (dx if keep is None else dy).to(ctx.y_dtype)
    d_weight, d_bias, dy_sum = sums.unbind()
    d_y_bias, d_bias = dy_sum if ctx.has_y_bias else None, d_bias if ctx.has_bias else None
    return dx, dy, d_y_bias, None, None, d_weight, d_bias, None, None, None


_add_norm.register_autograd(_go_back, setup_context=_keep)
