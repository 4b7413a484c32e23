"""The residual stream, and what a part of a block is about to add to it.

Shape suffixes: B batch, T time, C width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from gptmill.models.fp8 import Scaled, apply_weight


class Branch(NamedTuple):
    """What a part of a block adds to the stream. Tensors only: torch.compile lets nothing else out of a block that is
    computed again."""

    y_BTC: Tensor
    bias_C: Tensor | None = None
    """The last layer's, where it is still to be added."""
    keep_BTC: Tensor | None = None
    """What dropout leaves of y and its bias, where it is still to be applied; the rest is zero."""
    factor: Tensor | None = None
    """What that is multiplied with."""

    def complete(self) -> Tensor:
        """All of it, as one tensor."""
        y_BTC = self.y_BTC if self.bias_C is None else self.y_BTC + self.bias_C.to(self.y_BTC.dtype)
        return y_BTC if self.keep_BTC is None or self.factor is None else y_BTC * self.keep_BTC * self.factor


class Stream(NamedTuple):
    """A sum whose last term may still stand beside it: adding it and the norm after it are one pass over memory."""

    x_BTC: Tensor
    branch: Branch | None = None

    def settle(self) -> Tensor:
        """The whole sum."""
        return self.x_BTC if self.branch is None else self.x_BTC + self.branch.complete()


class Normed(NamedTuple):
    """What a norm hands to the part behind it."""

    x_BTC: Tensor
    narrow: Scaled | None = None
    """The same in fp8, its rows those of all tokens, where the layer behind it multiplies so."""


def apply_last(linear: nn.Linear, x: Tensor, fused: bool) -> Branch:
    """The last layer of a part; fused, its bias is left for the sum."""
    return Branch(apply_weight(linear, x), linear.bias) if fused else Branch(linear(x))
