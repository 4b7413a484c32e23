"""SwiGLU's activation (Shazeer 2020), with a backward pass that writes both gradients into one tensor.

x holds the outputs of the packed gate and up projections side by side. With s = sigmoid(gate):

    y      = silu(gate) * up = gate * s * up
    d_gate = d_y * up * s * (1 + gate * (1 - s)),   d_up = d_y * gate * s

The forward pass is elementwise, and torch.compile fuses it. It saves x alone; the backward pass computes s again.

Shape suffixes: N tokens, F feed-forward width, E = 2 F; the gate is the first half of E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gptmill.models.casting import cast
from gptmill.models.kernels.custom_ops import make_custom_op


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 and returned in x's dtype."""
    result: Tensor = _SwiGlu.apply(x)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, dim=-1)
        return cast(gate * torch.sigmoid(gate) * up, x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = _swiglu_backward(d_y.flatten(0, -2), x.flatten(0, -2))
        return dx.view_as(x)


@make_custom_op("swiglu_backward")
def _swiglu_backward(d_y_NF: Tensor, x_NE: Tensor) -> Tensor:
    if x_NE.device.type != "cuda":
        return swiglu_backward_reference(d_y_NF, x_NE)
    from gptmill.models.kernels.swiglu_triton import run_backward

    return run_backward(d_y_NF.contiguous(), x_NE.contiguous())


def swiglu_backward_reference(d_y_NF: Tensor, x_NE: Tensor) -> Tensor:
    """Reference implementation: the gradient of x."""
    (gate, up), d_y = x_NE.float().chunk(2, dim=-1), d_y_NF.float()
    sigmoid = torch.sigmoid(gate)
    d_gate = d_y * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d_y * gate * sigmoid], dim=-1).to(x_NE.dtype)


@_swiglu_backward.register_fake
def _(d_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
