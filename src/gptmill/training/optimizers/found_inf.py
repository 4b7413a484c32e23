"""Skipping an update on the device where found_inf is 1, for the optimizers of this package.

Momentum averaged with itself stays the same, and an update times 0 changes nothing: so the same kernels run whether
an update is skipped or not, and the host need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def read_found_inf(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Whether to skip the update, as a boolean on the device; None if found_inf is not set."""
    found_inf: Tensor | None = vars(optimizer).get("found_inf")
    return None if found_inf is None else found_inf > 0


def select_factor(found_inf: Tensor | None, if_skipped: float, otherwise: float) -> Any:
    """`if_skipped` where found_inf is set, else `otherwise`."""
    # torch.where would copy both numbers to the device and synchronise. The sum is exact: one of its terms is 0.
    return otherwise if found_inf is None else found_inf.logical_not() * otherwise + found_inf * if_skipped


def mask_gradients(found_inf: Tensor | None, gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, replaced by the momenta where found_inf is set: NaN times 0 would still be NaN."""
    if found_inf is None:
        return list(gradients)
    return [torch.where(found_inf, momentum, new) for momentum, new in zip(momenta, gradients, strict=True)]


def init_momenta(optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str) -> list[Any]:
    """Returns the group's parameters that have a gradient, and creates their state `key` as zeros where missing."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in parameters:
        if key not in optimizer.state[parameter]:
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
    return parameters
