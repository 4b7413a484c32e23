"""The residual stream with its last addition still pending.

The plain model computes `x = x + dropout(y)` at the end of one part of a block and `norm(x)` at the beginning of the
next. Both are limited by memory, and one kernel can do them in a single pass (`add_norm`). So the fused model hands on
the two terms of the sum instead of the sum, and whoever needs the norm adds them up.

Shape suffixes: B batch, T sequence, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptmill.models.fused.fp8_layers import apply_weight
from gptmill.models.kernels.add_norm import add_norm
from gptmill.models.kernels.dropout_mask import dropout_mask
from gptmill.models.kernels.fp8 import ScaledTensor


class Branch(NamedTuple):
    """What a part of a block adds to the residual stream. Tensors only: torch.compile lets nothing else out of a block
    that is recomputed in the backward pass."""

    y_BTC: Tensor
    bias_C: Tensor | None = None
    """The last layer's bias, where it is still to be added."""
    dropout_mask_BTC: Tensor | None = None
    """What dropout keeps of y and its bias, where it is still to be applied."""
    dropout_scale: Tensor | None = None
    """1 / (1 - p), the factor of what is kept."""

    def materialize(self) -> Tensor:
        """The branch as one tensor."""
        y_BTC = self.y_BTC if self.bias_C is None else self.y_BTC + self.bias_C.to(self.y_BTC.dtype)
        if self.dropout_mask_BTC is None or self.dropout_scale is None:
            return y_BTC
        return y_BTC * self.dropout_mask_BTC * self.dropout_scale

    def copy_bias(self) -> Branch:
        """With the bias in memory of its own; its gradient still goes to the parameter."""
        if self.bias_C is None:
            return self
        # Not by _replace: torch 2.11 cannot compile a block that returns what that makes.
        return Branch(self.y_BTC, self.bias_C.clone(), self.dropout_mask_BTC, self.dropout_scale)

    def drop(self, p: float) -> Branch:
        """With dropout pending: only its mask is drawn now, since the bias is still to be added."""
        mask_BTC = dropout_mask(self.y_BTC.detach(), p)
        scale = torch.full((), 1 / (1 - p), device=mask_BTC.device)
        return Branch(self.y_BTC, self.bias_C, mask_BTC, scale)


class PendingResidual(NamedTuple):
    """x + branch, not added yet."""

    x_BTC: Tensor
    branch: Branch | None = None

    def materialize(self) -> Tensor:
        """The sum."""
        return self.x_BTC if self.branch is None else self.x_BTC + self.branch.materialize()


class Normed(NamedTuple):
    """A norm's result, and the same quantized to fp8 where the layer behind it multiplies so."""

    x_BTC: Tensor
    x_fp8: ScaledTensor | None = None


def add_and_normalise(norm: nn.Module, pending: PendingResidual, with_fp8: bool = False) -> tuple[Tensor, Normed]:
    """The sum, and its norm, also in fp8 if asked; in one pass where something is pending."""
    if pending.branch is None:
        return pending.x_BTC, Normed(norm(pending.x_BTC))
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    bias_C = norm.bias if isinstance(norm, nn.LayerNorm) else None
    x_BTC, normed_BTC, x_fp8 = add_norm(
        pending.x_BTC, *pending.branch, norm.weight, bias_C, norm.eps, is_rms=isinstance(norm, nn.RMSNorm),
        with_fp8=with_fp8,
    )  # fmt: skip
    return x_BTC, Normed(normed_BTC, x_fp8)


def apply_without_bias(linear: nn.Linear, x: Tensor) -> Branch:
    """The last layer of a part; its bias stays pending."""
    return Branch(apply_weight(linear, x), linear.bias)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype, where autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
