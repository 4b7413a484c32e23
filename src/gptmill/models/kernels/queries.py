"""The layer of queries, keys and values: on the way back their gradients are joined and summed up in one pass.

B batch, T time, N = B x T tokens, C width, H heads, D width of a head, E = 3 x H x D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.models.fp8 import Fp8Linear, Scaled, fits_tiles, multiply, scale_to_fp8
from gptmill.models.kernels.operations import make_operation
from gptmill.models.stream import Normed

Heads = tuple[Tensor, Tensor, Tensor]


def project_heads(normed: Normed, layer: nn.Linear, num_heads: int) -> Heads:
    """Queries, keys and values, each BTHD and a view of one result. Under autocast in its format."""
    kind = normed.x_BTC.device.type
    x_BTC = normed.x_BTC.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed.x_BTC
    narrow: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    emulated = False
    if isinstance(layer, Fp8Linear) and fits_tiles(x_BTC.flatten(0, 1), layer.weight):
        narrow = normed.narrow or scale_to_fp8(x_BTC.detach().flatten(0, 1), torch.float8_e4m3fn)
        emulated = layer.emulated
    heads: Heads = _ProjectHeads.apply(  # type: ignore[no-untyped-call]
        x_BTC, layer.weight, layer.bias, *narrow, num_heads, emulated
    )
    return heads


class _ProjectHeads(torch.autograd.Function):
    """The way forward may be in fp8, and x then comes in both formats; the way back is not."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_EC: Tensor, bias_E: Tensor, narrow_NC: Tensor | None,
        inverse_scale: Tensor | None, num_heads: int, emulated: bool,
    ) -> Heads:  # fmt: skip
        dtype = x_BTC.dtype
        ctx.save_for_backward(x_BTC, weight_EC)
        ctx.bias_dtype = bias_E.dtype
        if narrow_NC is None or inverse_scale is None:
            joined_BTE = F.linear(x_BTC, weight_EC.to(dtype), bias_E.to(dtype))
        else:
            narrow, weight = Scaled(narrow_NC, inverse_scale), scale_to_fp8(weight_EC, torch.float8_e4m3fn)
            joined_BTE = multiply(narrow, weight, dtype, emulated, bias_N=bias_E).view(*x_BTC.shape[:2], -1)
        q, k, v = joined_BTE.unflatten(-1, (3 * num_heads, -1)).split(num_heads, dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_EC = ctx.saved_tensors
        d_BTE, d_bias_E = _join(d_q, d_k, d_v)
        dx_BTC = d_BTE @ weight_EC.to(d_BTE.dtype)
        d_weight_EC = d_BTE.flatten(0, 1).t() @ x_BTC.flatten(0, 1)
        return dx_BTC, d_weight_EC.to(weight_EC.dtype), d_bias_E.to(ctx.bias_dtype), None, None, None, None


@make_operation("join_heads")
def _join(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> tuple[Tensor, Tensor]:
    if q_BTHD.device.type != "cuda":
        return join_plainly(q_BTHD, k_BTHD, v_BTHD)
    from gptmill.models.kernels.queries_triton import run_join

    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q_BTHD, k_BTHD, v_BTHD))
    return run_join(q, k, v)


def join_plainly(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> tuple[Tensor, Tensor]:
    """The twin: all heads side by side, and the sum over all tokens."""
    joined_BTE = torch.cat([part.flatten(2) for part in (q_BTHD, k_BTHD, v_BTHD)], dim=-1)
    return joined_BTE, joined_BTE.float().sum(dim=(0, 1))


@_join.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, D = q.shape
    return q.new_empty(B, T, 3 * H * D), q.new_empty(3 * H * D, dtype=torch.float32)
