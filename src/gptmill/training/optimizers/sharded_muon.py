"""Muon for matrices of which every rank holds some rows.

Momentum stays where its rows are. Only orthogonalisation needs whole matrices: each has one owner, to which all ranks
send their rows, and which sends back the rows of the update. Owners alternate, so that all ranks work at the same time.

B: batch of matrices of one shape; R, C: their rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gptmill.runtime.parallel.local_shards import is_sharded
from gptmill.training.optimizers import muon
from gptmill.training.optimizers.found_inf import init_momenta, mask_gradients, read_found_inf, select_factor
from gptmill.training.optimizers.matrix_exchange import MatrixExchange
from gptmill.training.optimizers.muon import Muon, orthogonalise

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedMuon(Muon):
    """Muon for local parameters; `sources` are the sharded ones that they are parts of."""

    def __init__(self, plain: Muon, sources: Mapping[nn.Parameter, Tensor]) -> None:
        super().__init__(plain.param_groups, plain.defaults["lr"], plain.defaults["momentum"], plain.packed_splits)
        self._sources = {parameter: _check_layout(source) for parameter, source in sources.items()}
        self._exchanges: dict[Any, MatrixExchange] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all matrices that have a gradient; all ranks call it together."""
        assert closure is None, "Muon takes no closure"
        found_inf = read_found_inf(self)
        for group in self.param_groups:
            for batch in self._batch(init_momenta(self, group, "momentum_buffer")):
                self._update(batch, group, found_inf)

    def _batch(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Groups parameters of the same whole shape, so that an owner has at most BATCH_ELEMENTS at a time."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            alike.setdefault((self._sources[parameter].shape, self._list_rows(parameter)), []).append(parameter)
        batches = []
        for same in alike.values():
            source = self._sources[same[0]]
            size = source.device_mesh.size(-1) * max(1, muon.BATCH_ELEMENTS // source.numel())
            batches += [same[start : start + size] for start in range(0, len(same), size)]
        return batches

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], found_inf: Tensor | None) -> None:
        """One step for parameters of the same shape."""
        lr, momentum, weights = group["lr"], group["momentum"], [parameter.data for parameter in parameters]
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = mask_gradients(found_inf, [_read_gradient(parameter) for parameter in parameters], momenta)
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = self._orthogonalise(parameters, torch._foreach_lerp(gradients, momenta, momentum))
        torch._foreach_mul_(updates, select_factor(found_inf, 0.0, -lr))
        torch._foreach_mul_(weights, select_factor(found_inf, 1.0, 1 - lr * group["weight_decay"]))
        torch._foreach_add_(weights, updates)

    def _orthogonalise(self, parameters: list[nn.Parameter], nesterov: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each parameter's update."""
        source, rows = self._sources[parameters[0]], self._list_rows(parameters[0])
        if source.dim() > 2:  # a stack is sharded between its matrices: they are whole on their ranks
            stacks = torch.cat(list(nesterov))
            return list(orthogonalise_packed(stacks, rows).split([len(stack) for stack in nesterov]))
        exchange = self._exchanges.setdefault(source.device_mesh, MatrixExchange(source.device_mesh))
        whole_BRC = exchange.gather(nesterov, source.shape[0])
        return exchange.scatter(orthogonalise_packed(whole_BRC, rows), nesterov)

    def _list_rows(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """How many rows each of the matrices has that a parameter packs."""
        return self.packed_splits.get(parameter, (self._sources[parameter].shape[-2],))


def orthogonalise_packed(matrices_BRC: Tensor, rows: Sequence[int]) -> Tensor:
    """Muon's update for a learning rate of 1, of packed matrices each by itself."""
    if not len(matrices_BRC):
        return matrices_BRC
    parts = []
    for part_BRC in matrices_BRC.split(list(rows), dim=-2):
        factor = math.sqrt(max(1.0, part_BRC.shape[-2] / part_BRC.shape[-1]))
        parts.append(orthogonalise(part_BRC).to(part_BRC.dtype) * factor)
    return torch.cat(parts, dim=-2)


def _read_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _check_layout(source: Tensor) -> DTensor:
    """FSDP shards the first dimension, along the last axis of its mesh."""
    assert is_sharded(source)
    *outer, last = source.placements
    assert last.is_shard(0), f"Muon knows rows and stacks that are sharded, not {source.placements}"
    assert all(placement.is_replicate() for placement in outer), f"Muon knows one axis of shards: {source.placements}"
    return source
