"""LocalView: the parameters of a sharded model as a rank's optimizer sees them, which are plain tensors.

Optimizers that treat every number by itself need no more; and no operation on the way knows of the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gptmill.runtime.parallel.local_shards import to_local
from gptmill.training.optimizers.param_groups import list_packed_splits


class LocalView(nn.Module):
    """A rank's part of each parameter, under the name and in the memory of the sharded one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = dict(model.named_parameters())
        """The sharded parameters by name."""
        self.local = {
            name: nn.Parameter(to_local(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in self.whole.items()
        }
        self.sources = {self.local[name]: parameter for name, parameter in self.whole.items()}
        """The sharded parameter of each local one."""
        self.packed_splits = list_packed_splits(model)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        assert recurse, "the names are those of a whole model"
        assert remove_duplicate, "every parameter has one name"
        for name, parameter in self.local.items():
            yield f"{prefix}.{name}" if prefix else name, parameter

    @torch.no_grad()
    def bind(self) -> None:
        """Takes over the gradients of the last backward pass."""
        for local, source in self.sources.items():
            local.data = to_local(source)  # FSDP moves it once, when its first forward pass pads it
            local.grad = None if source.grad is None else to_local(source.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients."""
        assert set_to_none, "FSDP makes new gradients in every step"
        for local, source in self.sources.items():
            local.grad = source.grad = None
