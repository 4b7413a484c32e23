"""Triton kernels of `add_norm`: bias, dropout, residual addition and norm in one pass forward and one backward.

Forward, for each token (row) of C channels:

    residual = x + mask * scale * (y + y_bias)
    x_hat    = (residual - mean) * rstd,  rstd = 1 / sqrt(var + eps)     LayerNorm (Ba et al. 2016)
    x_hat    = residual * rstd,           rstd = 1 / sqrt(mean(residual^2) + eps)   RMSNorm (Zhang & Sennrich 2019)
    normed   = x_hat * weight + bias

As separate operations, bias (read, write), dropout (read, write), addition (2 reads, write) and norm (read, write) move
9 N C e bytes; fused, x and y are read and residual and normed written: 4 N C e, plus N C for the mask. One program
holds a whole row in registers, so that mean and variance need no second read, and the variance can be computed from
centered values, without the cancellation of E[x^2] - E[x]^2. Programs start with the last row: the GEMM before wrote it
last, so it is still in the L2 cache.

`normed` can be stored in fp8 (e4m3) as well, for N C more bytes. Its scale needs no amax pass over the data: the
squares of x_hat sum up to at most C, so |normed| <= |weight| * sqrt(C) + |bias| in every row.

Backward, with g = d_normed * weight; the term mean(g) is LayerNorm's only:

    dx = d_residual + rstd * (g - x_hat * mean(g * x_hat) - mean(g)),   dy = dx * mask * scale
    d_weight = sum of d_normed * x_hat over rows,  d_bias = sum of d_normed,  d_y_bias = sum of dy

which moves 4 N C e bytes, or 5 N C e + N C with dropout, where separate operations take 11 N C e. A few programs per
multiprocessor stride over the rows and keep the three sums over their rows in registers. Each stores its partial sums
once, P x 3 x C in fp32, and a reduction over P follows: no atomics, hence the same result every time. The loop over
rows is software-pipelined: the loads of the next rows are in flight while a row is computed.

Shape suffixes: N tokens, C channels, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.fp8 import TINIEST_AMAX
from gptmill.models.kernels.triton_launch import wrap

PROGRAMS_PER_SM = 4  # of the backward pass, each with partial sums of its own
STAGES = 4  # of software pipelining: rows in flight from memory


@triton.jit
def add_norm_forward_kernel(
    x_ptr, y_ptr, y_bias_ptr, mask_ptr, dropout_scale_ptr, weight_ptr, bias_ptr, residual_ptr, normed_ptr, fp8_ptr,
    inverse_scale_ptr, mean_ptr, rstd_ptr, width,
    EPS: tl.constexpr, FP8_MAX: tl.constexpr, MIN_AMAX: tl.constexpr,  # else torch.compile makes them fp64
    HAS_Y_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RMS: tl.constexpr,
    WITH_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # From the last row on: the GEMM before has left the last rows in the L2 cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    offsets = row * width + columns
    added = tl.load(y_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_Y_BIAS:
        added += tl.load(y_bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        added *= tl.load(mask_ptr + offsets, mask=is_inside, other=0).to(tl.float32) * tl.load(dropout_scale_ptr)
    total = tl.load(x_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32) + added
    residual = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + offsets, residual, mask=is_inside)
    x = residual.to(tl.float32)
    mean = 0.0
    if not IS_RMS:
        mean = tl.sum(x, axis=0) / width
        tl.store(mean_ptr + row, mean)
    centered = tl.where(is_inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=0) / width + EPS)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    normed = centered * rstd * weight
    bounds = tl.abs(weight) * tl.sqrt(tl.cast(width, tl.float32))
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
        normed += bias
        bounds += tl.abs(bias)
    tl.store(normed_ptr + offsets, normed.to(normed_ptr.dtype.element_ty), mask=is_inside)
    if WITH_FP8:
        amax = tl.maximum(tl.max(bounds, axis=0), MIN_AMAX)
        scaled = tl.clamp(normed * (FP8_MAX / amax), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(fp8_ptr + offsets, scaled.to(fp8_ptr.dtype.element_ty), mask=is_inside)
        if row == 0:
            tl.store(inverse_scale_ptr, amax / FP8_MAX)


@triton.jit
def add_norm_backward_kernel(
    d_residual_ptr, d_normed_ptr, residual_ptr, mean_ptr, rstd_ptr, mask_ptr, dropout_scale_ptr, weight_ptr, dx_ptr,
    dy_ptr, sums_ptr, rows, width,
    HAS_MASK: tl.constexpr, IS_RMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    dy_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    dropout_scale = 1.0
    if HAS_MASK:
        dropout_scale = tl.load(dropout_scale_ptr)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        offsets = tl.cast(row, tl.int64) * width + columns
        x = tl.load(residual_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        dx = tl.load(d_residual_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if not IS_RMS:
            mean = tl.load(mean_ptr + row)
        x_hat = tl.where(is_inside, (x - mean) * rstd, 0.0)
        d_x_hat = d_normed * weight
        d_centered = d_x_hat - x_hat * (tl.sum(x_hat * d_x_hat, axis=0) / width)
        if not IS_RMS:
            d_centered -= tl.sum(d_x_hat, axis=0) / width
        dx += d_centered * rstd
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=is_inside)
        d_weight += d_normed * x_hat
        d_bias += d_normed
        dy = dx
        if HAS_MASK:
            dy *= tl.load(mask_ptr + offsets, mask=is_inside, other=0).to(tl.float32) * dropout_scale
            tl.store(dy_ptr + offsets, dy.to(dy_ptr.dtype.element_ty), mask=is_inside)
        dy_sum += dy
    sums_row_ptr = sums_ptr + program * 3 * width + columns
    tl.store(sums_row_ptr, d_weight, mask=is_inside)
    tl.store(sums_row_ptr + width, d_bias, mask=is_inside)
    tl.store(sums_row_ptr + 2 * width, dy_sum, mask=is_inside)


def run_forward(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, mask_NC: Tensor | None, dropout_scale: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, with_fp8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns residual, normed, normed in fp8 and its inverse scale, and the means and rstds that backward needs.

    The fp8 results are empty unless asked for, the means are for RMSNorm.
    """
    rows, width = x_NC.shape
    fp8_NC = x_NC.new_empty(rows if with_fp8 else 0, width, dtype=torch.float8_e4m3fn)
    inverse_scale = x_NC.new_empty(() if with_fp8 else 0, dtype=torch.float32)
    residual_NC, normed_NC = torch.empty_like(x_NC), torch.empty_like(x_NC)
    mean_N = x_NC.new_empty(0 if is_rms else rows, dtype=torch.float32)
    rstd_N = x_NC.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    # Pointers that the kernel does not use get another input: GPUs without fp8 cannot even compile an fp8 pointer.
    wrap(add_norm_forward_kernel)[(rows,)](
        x_NC, y_NC, weight_C if y_bias_C is None else y_bias_C, x_NC if mask_NC is None else mask_NC,
        weight_C if dropout_scale is None else dropout_scale, weight_C, weight_C if bias_C is None else bias_C,
        residual_NC, normed_NC, fp8_NC if with_fp8 else x_NC, inverse_scale if with_fp8 else weight_C,
        x_NC if is_rms else mean_N, rstd_N, width,
        EPS=eps, FP8_MAX=torch.finfo(torch.float8_e4m3fn).max, MIN_AMAX=TINIEST_AMAX,
        HAS_Y_BIAS=y_bias_C is not None, HAS_MASK=mask_NC is not None, HAS_BIAS=bias_C is not None, IS_RMS=is_rms,
        WITH_FP8=with_fp8, BLOCK=block, num_warps=count_warps(block),
    )  # fmt: skip
    return residual_NC, normed_NC, fp8_NC, inverse_scale, mean_N, rstd_N


def run_backward(
    d_residual_NC: Tensor, d_normed_NC: Tensor, residual_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    mask_NC: Tensor | None, dropout_scale: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dx, dy (empty without dropout: then it equals dx), and the gradients of weight, bias and y_bias."""
    rows, width = residual_NC.shape
    programs = min(rows, PROGRAMS_PER_SM * count_sms(residual_NC.device))
    dx_NC, dy_NC = torch.empty_like(residual_NC), residual_NC.new_empty(0 if mask_NC is None else rows, width)
    sums_P3C = residual_NC.new_empty(programs, 3, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    wrap(add_norm_backward_kernel)[(programs,)](
        d_residual_NC, d_normed_NC, residual_NC, rstd_N if is_rms else mean_N, rstd_N,
        residual_NC if mask_NC is None else mask_NC, weight_C if dropout_scale is None else dropout_scale, weight_C,
        dx_NC, residual_NC if mask_NC is None else dy_NC, sums_P3C, rows, width,
        HAS_MASK=mask_NC is not None, IS_RMS=is_rms, BLOCK=block, STAGES=STAGES,
        num_warps=max(1, count_warps(block) // 2),
    )  # fmt: skip
    return dx_NC, dy_NC, sums_P3C.sum(dim=0)


def count_warps(block: int) -> int:
    """Warps for about eight elements per thread."""
    return min(16, max(1, block // 256))


def count_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
