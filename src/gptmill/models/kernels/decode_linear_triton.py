"""Triton kernel of a linear layer for a few rows, with what stands around it in a decode step.

    result = activation(norm(x) @ weight^T + bias) + residual

A decode step multiplies one row per sequence with every weight of the model: it is bound by reading the weights once,
and, in a small model, by the number of kernels, each of which waits for the one before. So one kernel does what would
be four: norm, product, bias with activation, and the addition to the residual stream.

One or two rows are multiplied element by element. Each program owns some rows of the weight, loads them before anything
else, since they do not depend on the kernel before, and computes the norm of the input by itself: that costs less than
waiting for another kernel to do so. More rows take tensor cores, padded to their tile; the norm is then a kernel of its
own, since its result is what the tensor cores read.

SwiGLU reads two rows of the weight for each result: the gate's, and the one that it gates N rows further on.

Shape suffixes: B rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptmill.models.kernels.decode_linear import Activation, LinearStep
from gptmill.models.kernels.programmatic_launch import allow_next, make_launch_options, wait_for_previous

ACTIVATIONS: dict[Activation, int] = {"none": 0, "gelu": 1, "relu2": 2, "swiglu": 3}
MAX_SCALAR_ROWS = 2  # more are faster by tensor cores
MAX_SCALAR_WIDTH = 8192
SCALAR_TILE = 8192  # weights of a program
BLOCK_N = 16  # outputs of a program with tensor cores
MAX_BLOCK_K = 256
STAGES = 4  # of software pipelining: tiles in flight from memory
TILE_BYTES = 96 << 10  # of shared memory, for all stages: what every GPU of the last generations has
TILE_ROWS = 16  # the fewest rows of a tensor core's tile


@triton.jit
def _gelu(x):
    # The tanh approximation; 1 - 2 / (exp(2 y) + 1) is tanh(y) without overflow.
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))


@triton.jit
def _finish(
    sums, gated, bias_ptr, residual_ptr, result_ptr, rows, outputs, n_outputs, is_inside, n_inside,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=n_inside, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        sums = _gelu(sums)
    if ACTIVATION == 2:
        sums = tl.maximum(sums, 0.0)
        sums = sums * sums
    if ACTIVATION == 3:
        if HAS_BIAS:
            gated += tl.load(bias_ptr + n_outputs + outputs, mask=n_inside, other=0.0).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums)) * gated
    offsets = rows * n_outputs + outputs
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(result_ptr + offsets, sums.to(result_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def few_rows_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, bias_ptr, residual_ptr, result_ptr, n_inputs, n_outputs, eps,
    ROWS: tl.constexpr, NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = outputs < n_outputs
    inputs = tl.arange(0, BLOCK_K)
    k_inside = inputs < n_inputs
    offsets = outputs[:, None].to(tl.int64) * n_inputs + inputs[None, :]
    inside = n_inside[:, None] & k_inside[None, :]
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 3:
        second = tl.load(weight_ptr + n_outputs.to(tl.int64) * n_inputs + offsets, mask=inside, other=0.0)
        second = second.to(tl.float32)
    if NORM != 0:
        scale = tl.load(norm_weight_ptr + inputs, mask=k_inside, other=0.0).to(tl.float32)
        if HAS_NORM_BIAS:
            shift = tl.load(norm_bias_ptr + inputs, mask=k_inside, other=0.0).to(tl.float32)
    allow_next(EARLY)
    wait_for_previous(EARLY)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * n_inputs + inputs, mask=k_inside, other=0.0).to(tl.float32)
        if NORM != 0:
            if NORM == 1:
                x = tl.where(k_inside, x - tl.sum(x, axis=0) / n_inputs, 0.0)
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_inputs + eps) * scale
            if HAS_NORM_BIAS:
                x += shift
        sums = tl.sum(weight * x[None, :], axis=1)
        gated = sums
        if ACTIVATION == 3:
            gated = tl.sum(second * x[None, :], axis=1)
        _finish(
            sums, gated, bias_ptr, residual_ptr, result_ptr, row, outputs, n_outputs, n_inside, n_inside,
            HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
        )  # fmt: skip


@triton.jit
def many_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, result_ptr, n_rows, n_inputs, n_outputs,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b_inside = rows < n_rows
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = outputs < n_outputs
    columns = tl.arange(0, BLOCK_K)
    allow_next(EARLY)
    wait_for_previous(EARLY)
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    gated = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(0, n_inputs, BLOCK_K, num_stages=STAGES):
        inputs = start + columns
        k_inside = inputs < n_inputs
        inside = b_inside[:, None] & k_inside[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inputs + inputs[None, :], mask=inside, other=0.0)
        offsets = outputs[None, :].to(tl.int64) * n_inputs + inputs[:, None]
        inside = n_inside[None, :] & k_inside[:, None]
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        if ACTIVATION == 3:
            second = tl.load(weight_ptr + n_outputs.to(tl.int64) * n_inputs + offsets, mask=inside, other=0.0)
            gated = tl.dot(x, second, gated, input_precision="ieee")
    inside = b_inside[:, None] & n_inside[None, :]
    _finish(
        sums, gated, bias_ptr, residual_ptr, result_ptr, rows[:, None], outputs[None, :], n_outputs, inside,
        n_inside[None, :], HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
    )  # fmt: skip


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, result_ptr, width, eps,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    allow_next(EARLY)
    wait_for_previous(EARLY)
    offsets = tl.program_id(0) * width + columns
    x = tl.load(x_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if NORM == 1:
        x = tl.where(is_inside, x - tl.sum(x, axis=0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(result_ptr + offsets, x.to(result_ptr.dtype.element_ty), mask=is_inside)


def run_decode_linear(step: LinearStep) -> None:
    rows, inputs = step.x_BK.shape
    is_few = rows <= MAX_SCALAR_ROWS and inputs <= MAX_SCALAR_WIDTH
    launch = _launch_few if is_few else _launch_many
    launch(step)


def _launch_few(step: LinearStep) -> None:
    x_BK, weight_NK, bias_N, result_BN, norm, activation, residual_BN = step
    (n_rows, n_inputs), n_outputs = x_BK.shape, result_BN.shape[1]
    norm_weight, norm_bias, eps, is_rms = norm if norm is not None else (None, None, 0.0, False)
    tensors = [x_BK, norm_weight, norm_bias, weight_NK, bias_N, residual_BN, result_BN]
    width = triton.next_power_of_2(n_inputs)
    block = max(1, SCALAR_TILE // width // (2 if activation == "swiglu" else 1))
    few_rows_kernel[(triton.cdiv(n_outputs, block),)](
        *(result_BN if tensor is None else tensor for tensor in tensors), n_inputs, n_outputs, eps, ROWS=n_rows,
        NORM=0 if norm is None else 2 if is_rms else 1, HAS_NORM_BIAS=norm_bias is not None,
        HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_BN is not None, ACTIVATION=ACTIVATIONS[activation],
        BLOCK_N=block, BLOCK_K=width, num_warps=8, **make_launch_options(),
    )  # fmt: skip


def _launch_many(step: LinearStep) -> None:
    x_BK, weight_NK, bias_N, result_BN, norm, activation, residual_BN = step
    (n_rows, n_inputs), n_outputs = x_BK.shape, result_BN.shape[1]
    if norm is not None:
        weight, bias, eps, is_rms = norm
        normed_BK = torch.empty_like(x_BK, dtype=weight_NK.dtype)
        norm_kernel[(n_rows,)](
            x_BK, weight, weight if bias is None else bias, normed_BK, n_inputs, eps, NORM=2 if is_rms else 1,
            HAS_BIAS=bias is not None, BLOCK=triton.next_power_of_2(n_inputs), num_warps=4, **make_launch_options(),
        )  # fmt: skip
        x_BK = normed_BK
    rows = min(64, max(TILE_ROWS, triton.next_power_of_2(n_rows)))
    tile_rows = rows + BLOCK_N * (2 if activation == "swiglu" else 1)
    fitting = TILE_BYTES // (STAGES * tile_rows * weight_NK.element_size())
    block = min(MAX_BLOCK_K, triton.next_power_of_2(fitting + 1) // 2)
    tensors = (x_BK, weight_NK, bias_N, residual_BN, result_BN)
    many_rows_kernel[(triton.cdiv(n_outputs, BLOCK_N), triton.cdiv(n_rows, rows))](
        *(result_BN if tensor is None else tensor for tensor in tensors), n_rows, n_inputs, n_outputs, ROWS=rows,
        HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_BN is not None, ACTIVATION=ACTIVATIONS[activation],
        BLOCK_N=BLOCK_N, BLOCK_K=block, STAGES=STAGES, num_warps=2, **make_launch_options(),
    )  # fmt: skip
