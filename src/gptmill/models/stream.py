"""The residual stream, and what a part of a block is about to add to it.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from gptmill.models.fp8 import Scaled, apply_weight


class Branch(NamedTuple):
    """What a part of a block adds to the stream."""

    y_BTC: Tensor
    bias_C: Tensor | None = None
    """The last layer's, where it is still to be added."""


class Stream(NamedTuple):
    """A sum whose last term may still stand beside it: adding it and the norm after it are one pass over memory."""

    x_BTC: Tensor
    branch: Branch | None = None

    def settle(self) -> Tensor:
        """The whole sum."""
        if self.branch is None:
            return self.x_BTC
        y_BTC, bias_C = self.branch
        return self.x_BTC + (y_BTC if bias_C is None else y_BTC + bias_C.to(y_BTC.dtype))


class Normed(NamedTuple):
    """What a norm hands to the part behind it."""

    x_BTC: Tensor
    narrow: Scaled | None = None
    """The same in fp8, its rows those of all tokens, where the layer behind it multiplies so."""


def apply_last(linear: nn.Linear, x: Tensor, fused: bool) -> Branch:
    """The last layer of a part; fused, its bias is left for the sum."""
    return Branch(apply_weight(linear, x), linear.bias) if fused else Branch(linear(x))
