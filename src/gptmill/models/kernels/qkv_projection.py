"""The QKV projection, with RoPE, and a backward pass that packs the three gradients.

One GEMM makes queries, keys and values side by side: qkv = x @ w.T + b, with E = 3 x H x D columns. The forward pass
hands out three views of the result, the former two rotated by RoPE; torch.compile fuses the rotation by itself.

Attention's backward pass returns dq, dk and dv as three tensors. The gradients of x and w need them packed into one
N x E matrix p again, rotated back, and the bias needs their sum over all tokens. One Triton kernel does all of it in a
single pass (`qkv_projection_triton.py`); then dx = p @ w, dw = p.T @ x, and db is the sum.

The forward GEMM may run in fp8 (the input then comes in both formats); the backward GEMMs do not.

Shape suffixes: B batch, T sequence, N = B x T tokens, C channels, H heads, D head dimension, E = 3 x H x D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.kernels.custom_ops import make_custom_op
from gptmill.models.kernels.fp8 import Fp8Input, ScaledTensor, quantize_fp8, scaled_gemm
from gptmill.models.rotary import CosSin, apply_rope

Heads = tuple[Tensor, Tensor, Tensor]


def project_qkv(
    x_BTC: Tensor, weight_EC: Tensor, bias_E: Tensor | None, x_fp8: Fp8Input, num_heads: int, rope: CosSin | None
) -> Heads:
    """Queries, keys and values, each BTHD and in x's dtype, the former two rotated where RoPE is given."""
    cos_TD, sin_TD = rope or (None, None)
    heads: Heads = _QkvProjection.apply(  # type: ignore[no-untyped-call]
        x_BTC, weight_EC, bias_E, *x_fp8, num_heads, cos_TD, sin_TD
    )
    return heads


class _QkvProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_EC: Tensor, bias_E: Tensor | None, fp8_NC: Tensor | None,
        inverse_scale: Tensor | None, emulated: bool, num_heads: int, cos_TD: Tensor | None, sin_TD: Tensor | None,
    ) -> Heads:  # fmt: skip
        dtype = x_BTC.dtype
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        if fp8_NC is None or inverse_scale is None:
            packed_BTE = F.linear(x_BTC, weight_EC.to(dtype), None if bias_E is None else bias_E.to(dtype))
        else:
            x_fp8, weight = ScaledTensor(fp8_NC, inverse_scale), quantize_fp8(weight_EC, torch.float8_e4m3fn)
            packed_BTE = scaled_gemm(x_fp8, weight, dtype, emulated, bias_N=bias_E).view(*x_BTC.shape[:2], -1)
        q, k, v = packed_BTE.unflatten(-1, (3 * num_heads, -1)).split(num_heads, dim=2)
        ctx.has_rope = cos_TD is not None
        if cos_TD is None or sin_TD is None:
            ctx.save_for_backward(x_BTC, weight_EC)
            return q, k, v
        ctx.save_for_backward(x_BTC, weight_EC, cos_TD, sin_TD)
        return apply_rope(q, (cos_TD, sin_TD)), apply_rope(k, (cos_TD, sin_TD)), v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_EC, *angles = ctx.saved_tensors
        cos_TD, sin_TD = angles if ctx.has_rope else (None, None)
        d_BTE, d_bias_E = _pack_gradients(d_q, d_k, d_v, cos_TD, sin_TD, ctx.bias_dtype is not None)
        dx_BTC = d_BTE @ weight_EC.to(d_BTE.dtype)
        d_weight_EC = d_BTE.flatten(0, 1).t() @ x_BTC.flatten(0, 1)
        d_bias = None if ctx.bias_dtype is None else d_bias_E.to(ctx.bias_dtype)
        return dx_BTC, d_weight_EC.to(weight_EC.dtype), d_bias, *[None] * 6


@make_custom_op("pack_qkv_gradients")
def _pack_gradients(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    if q_BTHD.device.type != "cuda":
        return pack_gradients_reference(q_BTHD, k_BTHD, v_BTHD, cos_TD, sin_TD, with_sums)
    from gptmill.models.kernels.qkv_projection_triton import run_pack

    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q_BTHD, k_BTHD, v_BTHD))
    cos_TD, sin_TD = (None if angles is None else angles.contiguous() for angles in (cos_TD, sin_TD))
    return run_pack(q, k, v, cos_TD, sin_TD, with_sums)


def pack_gradients_reference(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Reference implementation: all heads packed, queries and keys rotated back, and the sum over tokens if asked."""
    if cos_TD is not None and sin_TD is not None:
        # Each channel has its partner's sine, with the opposite sign.
        inverse = (cos_TD, -sin_TD.roll(sin_TD.shape[-1] // 2, dims=-1))
        q_BTHD, k_BTHD = apply_rope(q_BTHD, inverse), apply_rope(k_BTHD, inverse)
    packed_BTE = torch.cat([part.flatten(2) for part in (q_BTHD, k_BTHD, v_BTHD)], dim=-1)
    sums_E = packed_BTE.float().sum(dim=(0, 1)) if with_sums else packed_BTE.new_empty(0, dtype=torch.float32)
    return packed_BTE, sums_E


@_pack_gradients.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _cos: Any, _sin: Any, with_sums: bool) -> tuple[Tensor, Tensor]:
    B, T, H, D = q.shape
    return q.new_empty(B, T, 3 * H * D), q.new_empty(3 * H * D if with_sums else 0, dtype=torch.float32)
