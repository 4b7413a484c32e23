"""Triton kernels of `add_norm`: one pass over the rows forward, one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.fp8 import TINIEST_AMAX
from gptmill.models.kernels.wrapped_triton import wrap

PROGRAMS_PER_PROCESSOR = 4  # of the backward pass, each with sums of its own
STAGES = 4  # of rows on their way from memory


@triton.jit
def add_norm_forward_kernel(
    x_ptr, y_ptr, y_bias_ptr, keep_ptr, factor_ptr, weight_ptr, bias_ptr, stream_ptr, normed_ptr, fp8_ptr,
    inverse_scale_ptr, mean_ptr, rstd_ptr, width,
    EPS: tl.constexpr, LARGEST: tl.constexpr, TINIEST: tl.constexpr,  # else torch.compile makes them fp64
    HAS_Y_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RMS: tl.constexpr,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # From the end: of what the matmul before has written, the last rows are still in the cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    here = row * width + columns
    added = tl.load(y_ptr + here, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_Y_BIAS:
        added += tl.load(y_bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_KEEP:
        added *= tl.load(keep_ptr + here, mask=is_inside, other=0).to(tl.float32) * tl.load(factor_ptr)
    total = tl.load(x_ptr + here, mask=is_inside, other=0.0).to(tl.float32) + added
    stream = total.to(stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + here, stream, mask=is_inside)
    x = stream.to(tl.float32)
    mean = 0.0
    if not IS_RMS:
        mean = tl.sum(x, axis=0) / width
        tl.store(mean_ptr + row, mean)
    away = tl.where(is_inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(away * away, axis=0) / width + EPS)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    normed = away * rstd * weight
    limits = tl.abs(weight) * tl.sqrt(tl.cast(width, tl.float32))
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
        normed += bias
        limits += tl.abs(bias)
    tl.store(normed_ptr + here, normed.to(normed_ptr.dtype.element_ty), mask=is_inside)
    if NARROW:
        limit = tl.maximum(tl.max(limits, axis=0), TINIEST)
        narrow = tl.clamp(normed * (LARGEST / limit), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(fp8_ptr + here, narrow.to(fp8_ptr.dtype.element_ty), mask=is_inside)
        if row == 0:
            tl.store(inverse_scale_ptr, limit / LARGEST)


@triton.jit
def add_norm_backward_kernel(
    d_stream_ptr, d_normed_ptr, stream_ptr, mean_ptr, rstd_ptr, keep_ptr, factor_ptr, weight_ptr, dx_ptr, dy_ptr,
    sums_ptr, rows, width,
    HAS_KEEP: tl.constexpr, IS_RMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    dy_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    factor = 1.0
    if HAS_KEEP:
        factor = tl.load(factor_ptr)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        here = tl.cast(row, tl.int64) * width + columns
        x = tl.load(stream_ptr + here, mask=is_inside, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + here, mask=is_inside, other=0.0).to(tl.float32)
        dx = tl.load(d_stream_ptr + here, mask=is_inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if not IS_RMS:
            mean = tl.load(mean_ptr + row)
        hat = tl.where(is_inside, (x - mean) * rstd, 0.0)
        d_hat = d_normed * weight
        away = d_hat - hat * (tl.sum(hat * d_hat, axis=0) / width)
        if not IS_RMS:
            away -= tl.sum(d_hat, axis=0) / width
        dx += away * rstd
        tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), mask=is_inside)
        d_weight += d_normed * hat
        d_bias += d_normed
        dy = dx
        if HAS_KEEP:
            dy *= tl.load(keep_ptr + here, mask=is_inside, other=0).to(tl.float32) * factor
            tl.store(dy_ptr + here, dy.to(dy_ptr.dtype.element_ty), mask=is_inside)
        dy_sum += dy
    place = sums_ptr + program * 3 * width + columns
    tl.store(place, d_weight, mask=is_inside)
    tl.store(place + width, d_bias, mask=is_inside)
    tl.store(place + 2 * width, dy_sum, mask=is_inside)


def run_forward(
    x_NC: Tensor, y_NC: Tensor, y_bias_C: Tensor | None, keep_NC: Tensor | None, factor: Tensor | None,
    weight_C: Tensor, bias_C: Tensor | None, eps: float, is_rms: bool, narrow: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, width = x_NC.shape
    fp8_NC = x_NC.new_empty(rows if narrow else 0, width, dtype=torch.float8_e4m3fn)
    inverse_scale = x_NC.new_empty(() if narrow else 0, dtype=torch.float32)
    stream_NC, normed_NC = torch.empty_like(x_NC), torch.empty_like(x_NC)
    mean_N = x_NC.new_empty(0 if is_rms else rows, dtype=torch.float32)
    rstd_N = x_NC.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    # What the kernel leaves alone is another of its inputs: a card without fp8 does not even know its pointers.
    wrap(add_norm_forward_kernel)[(rows,)](
        x_NC, y_NC, weight_C if y_bias_C is None else y_bias_C, x_NC if keep_NC is None else keep_NC,
        weight_C if factor is None else factor, weight_C, weight_C if bias_C is None else bias_C,
        stream_NC, normed_NC, fp8_NC if narrow else x_NC, inverse_scale if narrow else weight_C,
        x_NC if is_rms else mean_N, rstd_N, width,
        EPS=eps, LARGEST=torch.finfo(torch.float8_e4m3fn).max, TINIEST=TINIEST_AMAX,
        HAS_Y_BIAS=y_bias_C is not None, HAS_KEEP=keep_NC is not None, HAS_BIAS=bias_C is not None, IS_RMS=is_rms,
        NARROW=narrow, BLOCK=block, num_warps=count_warps(block),
    )  # fmt: skip
    return stream_NC, normed_NC, fp8_NC, inverse_scale, mean_N, rstd_N


def run_backward(
    d_stream_NC: Tensor, d_normed_NC: Tensor, stream_NC: Tensor, mean_N: Tensor, rstd_N: Tensor,
    keep_NC: Tensor | None, factor: Tensor | None, weight_C: Tensor, is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, width = stream_NC.shape
    programs = min(rows, PROGRAMS_PER_PROCESSOR * count_processors(stream_NC.device))
    dx_NC, dy_NC = torch.empty_like(stream_NC), stream_NC.new_empty(0 if keep_NC is None else rows, width)
    sums_P3C = stream_NC.new_empty(programs, 3, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    wrap(add_norm_backward_kernel)[(programs,)](
        d_stream_NC, d_normed_NC, stream_NC, rstd_N if is_rms else mean_N, rstd_N,
        stream_NC if keep_NC is None else keep_NC, weight_C if factor is None else factor, weight_C,
        dx_NC, stream_NC if keep_NC is None else dy_NC, sums_P3C, rows, width,
        HAS_KEEP=keep_NC is not None, IS_RMS=is_rms, BLOCK=block, STAGES=STAGES,
        num_warps=max(1, count_warps(block) // 2),
    )  # fmt: skip
    return dx_NC, dy_NC, sums_P3C.sum(dim=0)


def count_warps(block: int) -> int:
    """About eight numbers for each thread."""
    return min(16, max(1, block // 256))


def count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
