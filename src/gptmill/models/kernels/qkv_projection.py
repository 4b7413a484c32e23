"""The layer of queries, keys and values: on the way back their gradients are turned, joined and summed up in one pass.

B batch, T time, N = B x T tokens, C width, H heads, D width of a head, E = 3 x H x D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.models.fp8 import Scaled, find_fp8_input, multiply, scale_to_fp8
from gptmill.models.kernels.custom_ops import make_custom_op
from gptmill.models.rotary import Rotation, rotate
from gptmill.models.stream import Normed

Heads = tuple[Tensor, Tensor, Tensor]


def project_qkv(normed: Normed, layer: nn.Linear, num_heads: int, rotation: Rotation | None) -> Heads:
    """Queries, keys and values, each BTHD, and turned where there is a rotation. Under autocast in its format."""
    kind = normed.x_BTC.device.type
    x_BTC = normed.x_BTC.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed.x_BTC
    narrow_NC, inverse_scale, emulated = find_fp8_input(layer, x_BTC.flatten(0, 1), normed.narrow)
    cos_TD, sin_TD = rotation or (None, None)
    heads: Heads = _ProjectHeads.apply(  # type: ignore[no-untyped-call]
        x_BTC, layer.weight, layer.bias, narrow_NC, inverse_scale, num_heads, emulated, cos_TD, sin_TD
    )
    return heads


class _ProjectHeads(torch.autograd.Function):
    """The way forward may be in fp8, and x then comes in both formats; the way back is not."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_EC: Tensor, bias_E: Tensor | None, narrow_NC: Tensor | None,
        inverse_scale: Tensor | None, num_heads: int, emulated: bool, cos_TD: Tensor | None, sin_TD: Tensor | None,
    ) -> Heads:  # fmt: skip
        dtype = x_BTC.dtype
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        if narrow_NC is None or inverse_scale is None:
            joined_BTE = F.linear(x_BTC, weight_EC.to(dtype), None if bias_E is None else bias_E.to(dtype))
        else:
            narrow, weight = Scaled(narrow_NC, inverse_scale), scale_to_fp8(weight_EC, torch.float8_e4m3fn)
            joined_BTE = multiply(narrow, weight, dtype, emulated, bias_N=bias_E).view(*x_BTC.shape[:2], -1)
        q, k, v = joined_BTE.unflatten(-1, (3 * num_heads, -1)).split(num_heads, dim=2)
        ctx.is_transposed = cos_TD is not None
        if cos_TD is None or sin_TD is None:
            ctx.save_for_backward(x_BTC, weight_EC)
            return q, k, v
        ctx.save_for_backward(x_BTC, weight_EC, cos_TD, sin_TD)
        return rotate(q, (cos_TD, sin_TD)), rotate(k, (cos_TD, sin_TD)), v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_EC, *angles = ctx.saved_tensors
        cos_TD, sin_TD = angles if ctx.is_transposed else (None, None)
        d_BTE, d_bias_E = _join(d_q, d_k, d_v, cos_TD, sin_TD, ctx.bias_dtype is not None)
        dx_BTC = d_BTE @ weight_EC.to(d_BTE.dtype)
        d_weight_EC = d_BTE.flatten(0, 1).t() @ x_BTC.flatten(0, 1)
        d_bias = None if ctx.bias_dtype is None else d_bias_E.to(ctx.bias_dtype)
        return dx_BTC, d_weight_EC.to(weight_EC.dtype), d_bias, *[None] * 6


@make_custom_op("pack_qkv_gradients")
def _join(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    if q_BTHD.device.type != "cuda":
        return join_reference(q_BTHD, k_BTHD, v_BTHD, cos_TD, sin_TD, with_sums)
    from gptmill.models.kernels.qkv_projection_triton import run_pack

    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q_BTHD, k_BTHD, v_BTHD))
    cos_TD, sin_TD = (None if angles is None else angles.contiguous() for angles in (cos_TD, sin_TD))
    return run_pack(q, k, v, cos_TD, sin_TD, with_sums)


def join_reference(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """The twin: all heads side by side, queries and keys turned back, and the sum over all tokens if it is wanted."""
    if cos_TD is not None and sin_TD is not None:
        # Each number has its partner's sine, and the other sign.
        back = (cos_TD, -sin_TD.roll(sin_TD.shape[-1] // 2, dims=-1))
        q_BTHD, k_BTHD = rotate(q_BTHD, back), rotate(k_BTHD, back)
    joined_BTE = torch.cat([part.flatten(2) for part in (q_BTHD, k_BTHD, v_BTHD)], dim=-1)
    sums_E = joined_BTE.float().sum(dim=(0, 1)) if with_sums else joined_BTE.new_empty(0, dtype=torch.float32)
    return joined_BTE, sums_E


@_join.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _cos: Any, _sin: Any, with_sums: bool) -> tuple[Tensor, Tensor]:
    B, T, H, D = q.shape
    return q.new_empty(B, T, 3 * H * D), q.new_empty(3 * H * D if with_sums else 0, dtype=torch.float32)
