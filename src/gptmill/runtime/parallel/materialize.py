"""Gives a model that was built and sharded on the meta device its memory and its first weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gptmill.runtime.parallel.local_shards import copy_whole


def materialize(model: nn.Module, device: torch.device, init: Callable[[str, Tensor], None]) -> None:
    """Fills one whole parameter after the other in host memory with `init`, and keeps this rank's part.

    So all ranks have the weights of a single one, and no rank ever holds more than its largest parameter whole.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        init(name, whole)
        copy_whole(parameter, whole)
