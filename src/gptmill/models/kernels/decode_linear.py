"""A linear layer for the few rows of a decode step, with the norm before it and the activation or residual behind it.

Shape suffixes: B rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "gelu", "relu2", "swiglu"]
Norm = tuple[Tensor, Tensor | None, float, bool]
"""Weight, bias, epsilon, and whether it is an RMSNorm."""


class LinearStep(NamedTuple):
    """activation(norm(x) @ weight^T + bias) + residual, to be written into `result_BN`."""

    x_BK: Tensor
    weight_NK: Tensor
    bias_N: Tensor | None
    result_BN: Tensor
    norm: Norm | None
    activation: Activation
    residual_BN: Tensor | None


def decode_linear(
    x_BK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    result_BN: Tensor,
    *,
    norm: Norm | None = None,
    activation: Activation = "none",
    residual_BN: Tensor | None = None,
) -> None:
    """Writes activation(norm(x) @ weight^T + bias) + residual into `result_BN`, which may be the residual itself."""
    step = LinearStep(x_BK, weight_NK, bias_N, result_BN, norm, activation, residual_BN)
    if x_BK.device.type != "cuda":
        result_BN.copy_(compute_reference(step))
        return
    from gptmill.models.kernels.decode_linear_triton import run_decode_linear

    run_decode_linear(step)


def compute_reference(step: LinearStep) -> Tensor:
    """Reference implementation, in fp32."""
    x_BK, weight_NK, bias_N, _, norm, activation, residual_BN = step
    x = x_BK.float()
    if norm is not None:
        weight, bias, eps, is_rms = norm
        if is_rms:
            x = F.rms_norm(x, x.shape[-1:], weight.float(), eps)
        else:
            x = F.layer_norm(x, x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
    y = F.linear(x, weight_NK.float(), None if bias_N is None else bias_N.float())
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "relu2":
        y = F.relu(y).square()
    elif activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual_BN is None else y + torch.as_tensor(residual_BN).float()
