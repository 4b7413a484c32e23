"""Leaving an update out on the device: what the optimizers of this package do where found_inf is 1.

A momentum that is its own gradient stays what it is, and an update times 0 changes nothing: so both ways are the same
kernels, and the host need not know which one it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def read_found_inf(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Whether the update is to be left out, as a flag on the device; None if nobody asks."""
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    return None if found_inf is None else found_inf > 0


def choose(is_bad: Tensor | None, if_bad: float, otherwise: float) -> Any:
    """A factor that depends on the flag."""
    # torch.where would copy both numbers to the device, and wait. This sum is exact, one of its terms being 0.
    return otherwise if is_bad is None else is_bad.logical_not() * otherwise + is_bad * if_bad


def zero_bad_gradients(is_bad: Tensor | None, gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, or the momenta in their place where the flag holds: a NaN times 0 were still a NaN."""
    if is_bad is None:
        return list(gradients)
    return [torch.where(is_bad, kept, new) for kept, new in zip(momenta, gradients, strict=True)]


def list_ready(optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str) -> list[Any]:
    """The parameters of a group that have a gradient; each has a momentum called `key` from here on."""
    ready = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in ready:
        if key not in optimizer.state[parameter]:
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
    return ready
