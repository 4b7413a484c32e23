"""Runs every Triton kernel on the CPU, in Triton's interpreter, and compares it with its reference implementation."""

from __future__ import annotations

import itertools
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gptmill.models.kernels import (
    accumulate,
    accumulate_triton,
    add_norm,
    add_norm_triton,
    bias_gelu,
    bias_gelu_triton,
    bucket_count,
    bucket_count_triton,
    decode_attention,
    decode_attention_triton,
    dropout_mask_triton,
    linear_cross_entropy,
    linear_cross_entropy_triton,
    qkv_projection,
    qkv_projection_triton,
    swiglu,
    swiglu_triton,
    transpose,
    transpose_triton,
    triton_launch,
)
from gptmill.runs.histogram_buckets import LEVELS, MIN_EXPONENT, PER_OCTAVE


def assert_all_close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        if one.dtype == torch.float8_e4m3fn and one.numel():
            # The interpreter loses the carry of rounding into the exponent, in one element of fifty.
            assert torch.isclose(one.float(), other.float(), rtol=0.13, atol=0.01).float().mean() > 0.95
        else:
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)


def check_add_norm() -> None:
    rows, width = 37, 96
    x, y, d_residual, d_normed = torch.randn(4, rows, width)
    y_bias, weight, bias = torch.randn(3, width)
    mask_and_scale = (torch.rand(rows, width) >= 0.2, torch.tensor(1.25))
    for is_rms, dropout in itertools.product((False, True), ((None, None), mask_and_scale)):
        for extra in (None, y_bias):
            norm = (weight, None if is_rms else bias, 1e-5, is_rms, extra is None)
            arguments = (x, y, extra, *dropout, *norm)
            wanted = add_norm.add_norm_reference(*arguments)
            found = add_norm_triton.run_forward(*arguments)
            scale = slice(3, 3 if extra is None else 4)  # undefined without fp8
            assert_all_close(found[: scale.start] + found[scale.stop :], wanted[: scale.start] + wanted[scale.stop :])
            residual, *_, mean, rstd = wanted
            back = (d_residual, d_normed, residual, mean, rstd, *dropout, weight, is_rms)
            assert_all_close(add_norm_triton.run_backward(*back), add_norm.add_norm_backward_reference(*back))


def check_bias_gelu() -> None:
    triton_launch.MAX_PROGRAMS = 2  # so that each has several blocks of rows
    d_y, x = torch.randn(2, 70, 600)
    bias = torch.randn(600)
    found = bias_gelu_triton.run_backward(d_y, x, bias, bias_gelu.SLOPE, bias_gelu.CUBE)
    assert_all_close(found, bias_gelu.gelu_backward_reference(d_y, x, bias))


def check_bucket_count() -> None:
    bucket_count_triton.BLOCK, bucket_count_triton.BLOCKS_PER_PROGRAM = 128, 2
    values = torch.randn(30, 20) * 10.0 ** torch.randint(-14, 5, (30, 20))
    values[0, :6] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e30])
    for tensor in (values, values.t(), values.bfloat16()):
        found = bucket_count_triton.run_count_buckets(tensor, MIN_EXPONENT, PER_OCTAVE, LEVELS)
        assert found.tolist() == bucket_count.count_buckets_reference(tensor, MIN_EXPONENT, PER_OCTAVE, LEVELS).tolist()


def check_decode_attention() -> None:
    rows, heads, kv_heads, width, capacity = 2, 4, 2, 16, 80
    decode_attention_triton.BLOCK_BYTES = 1024  # blocks of 16 positions
    rope_and_norm = tuple(torch.randn(2, capacity, width)), (torch.randn(width), torch.randn(width), 1e-5)
    for splits, window, more in itertools.product((1, 4), (None, 20), ((None, None), rope_and_norm)):
        positions = torch.tensor([0 if splits == 1 else 70, 37])
        qkv, caches = torch.randn(rows, (heads + 2 * kv_heads) * width), torch.randn(2, rows, kv_heads, capacity, width)
        found, wanted = (*caches.clone(), torch.zeros(rows, heads, width)), (*caches, torch.zeros(rows, heads, width))
        parts, counters = (
            torch.zeros(rows * heads * splits * (width + 2)),
            torch.zeros(rows * kv_heads, dtype=torch.int32),
        )
        decode_attention_triton.run_decode_attention(
            qkv, *found[:2], positions, found[2], window, *more, parts, counters, splits
        )
        decode_attention.decode_attention_reference(qkv, *wanted[:2], positions, wanted[2], window, *more)
        assert_all_close(found, wanted)
        assert not counters.any()  # ready for the next step


def check_linear_cross_entropy() -> None:
    logits, targets = torch.randn(20, 333), torch.randint(100, (20,))
    logits[7, 300] = 200.0  # so far above the first block's that its exponential overflows
    targets[3] = -100
    linear_cross_entropy_triton.BLOCK = 128
    # No padding; padding in the last block, in several blocks, and in the first one, too.
    for vocab_size, with_gradient in itertools.product((333, 320, 250, 100), (True, False)):
        found, wanted = logits.clone(), logits.clone()
        losses = linear_cross_entropy_triton.run_cross_entropy(
            found, targets, -100, found if with_gradient else None, 1.0, vocab_size
        )
        gradient = wanted if with_gradient else None
        expected = linear_cross_entropy.cross_entropy_reference(wanted, targets, gradient, vocab_size)
        torch.testing.assert_close(losses, expected)
        if with_gradient:
            torch.testing.assert_close(found, wanted)
            assert not found[:, vocab_size:].any()
        else:
            assert found[:, :vocab_size].equal(logits[:, :vocab_size])


def check_linear_cross_entropy_in_fp8() -> None:
    """Nearly everywhere: the interpreter rounds some elements to fp8 wrongly."""
    vocab_size = 320
    logits, targets = torch.randn(20, 333), torch.randint(vocab_size, (20,))
    targets[3] = -100
    linear_cross_entropy_triton.BLOCK = 128
    found, wanted = (torch.full((20, 333), 7.0).to(torch.float8_e5m2) for _ in range(2))
    before = logits.clone()
    scale = linear_cross_entropy.GRADIENT_SCALE
    linear_cross_entropy_triton.run_cross_entropy(logits, targets, -100, found, scale, vocab_size)
    linear_cross_entropy.cross_entropy_reference(logits, targets, wanted, vocab_size)
    assert logits[:, :vocab_size].equal(before[:, :vocab_size])
    assert not found[3].float().any()
    assert not found[:, vocab_size:].float().any()
    assert torch.isclose(found.float(), wanted.float(), rtol=0.26, atol=0.01).float().mean() > 0.95


def check_dropout_mask() -> None:
    """Elements are drawn independently, with the right probability; the mask is a function of the seed."""
    dropout_mask_triton.BLOCK = 64
    drawn = []
    for seed in (1, 1, 2**62):
        mask = dropout_mask_triton.run_dropout_mask(7 * 512 + 301, 0.2, torch.tensor(seed))
        assert len(mask) == 7 * 512 + 301
        assert mask.view(torch.uint8).max() == 1
        drawn.append(mask.float() - 0.8)
        assert abs(drawn[-1].mean()) < 4 * 0.4 / len(mask) ** 0.5
    assert drawn[0].equal(drawn[1])
    for one, other in (
        (drawn[0], drawn[2]),
        *((drawn[0][:-step], drawn[0][step:]) for step in (1, 2, 4, 64, 128, 512, 1942)),
    ):
        assert abs((one * other).mean()) < 4 * 0.16 / len(one) ** 0.5


def check_transpose() -> None:
    matrix = torch.randint(256, (152, 332), dtype=torch.uint8)
    assert transpose_triton.run_transpose(matrix).equal(transpose.transpose_reference(matrix))


def check_nan() -> None:
    """NaN stays NaN in the copy meant for fp8; tested in fp32, which the interpreter supports."""
    x, y, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
    x[2, 3] = float("nan")
    empty = torch.empty(4, 32)
    residual, normed, scale = empty.clone(), empty.clone(), torch.empty(())
    add_norm_triton.add_norm_forward_kernel[(4,)](
        x, y, None, None, None, weight, None, residual, normed, empty, scale, torch.empty(4), torch.empty(4), 32,
        EPS=1e-5, FP8_MAX=448.0, MIN_AMAX=1e-30, HAS_Y_BIAS=False, HAS_MASK=False, HAS_BIAS=False,
        IS_RMS=True, WITH_FP8=True, BLOCK=32,
    )  # fmt: skip
    assert normed.isnan().any()
    assert normed.isnan().equal(empty.isnan())


def check_swiglu() -> None:
    d_y, x = torch.randn(7, 1300), torch.randn(7, 2600)
    assert_all_close((swiglu_triton.run_backward(d_y, x),), (swiglu.swiglu_backward_reference(d_y, x),))


def check_accumulate() -> None:
    totals, new = [torch.randn(5000), torch.randn(70, 9)], [torch.randn(5000).bfloat16(), torch.randn(70, 9).bfloat16()]
    wanted = [total.clone() for total in totals]
    accumulate.accumulate_reference(wanted, new)
    for total, each in zip(totals, new, strict=True):
        accumulate_triton.run_accumulate(total, each)
    assert_all_close(tuple(totals), tuple(wanted))


def check_pack_qkv_gradients() -> None:
    triton_launch.MAX_PROGRAMS = 2
    q, k, v = (torch.randn(2, 50, 3, 16) for _ in range(3))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    angles = torch.rand(50, 16) * 6
    for more in ((None, None, True), (angles.cos(), angles.sin(), False), (angles.cos(), angles.sin(), True)):
        found = qkv_projection_triton.run_pack(q, k, v, *more)
        assert_all_close(found, qkv_projection.pack_gradients_reference(q, k, v, *more))


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in (
        check_accumulate,
        check_add_norm,
        check_bias_gelu,
        check_bucket_count,
        check_decode_attention,
        check_dropout_mask,
        check_linear_cross_entropy,
        check_linear_cross_entropy_in_fp8,
        check_nan,
        check_pack_qkv_gradients,
        check_swiglu,
        check_transpose,
    ):
        check()
        sys.stdout.write(check.__name__.removeprefix("check_") + "\n")
