"""Muon for matrices that ranks split by layouts.

Every rank gathers whole matrices for their orthogonalisation, one parameter at a time, and keeps its share of the
update. Ranks that share layers are few and close, so that each may compute what the others do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from gptmill.runtime.parallel.layouts import Layout
from gptmill.training.optimizers.muon import Muon
from gptmill.training.optimizers.sharded_muon import ShardedMuon, orthogonalise_packed


class SplitMuon(ShardedMuon):
    """Muon for shares of parameters; those without a layout are whole."""

    def __init__(self, plain: Muon, layouts: Mapping[nn.Parameter, Layout]) -> None:
        super().__init__(plain, {})
        self._layouts = layouts

    def _batch(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[parameter] for parameter in parameters]

    def _orthogonalise(self, parameters: list[nn.Parameter], nesterov: Sequence[Tensor]) -> list[Tensor]:
        (parameter,), (local,) = parameters, nesterov
        # A stack is split between its matrices, which are whole on their ranks.
        layout = self._layouts.get(parameter) if local.dim() == 2 else None
        whole = local if layout is None else layout.gather(local)
        rows = self.packed_splits.get(parameter, (whole.shape[-2],))
        update = orthogonalise_packed(whole.view(-1, *whole.shape[-2:]), rows).view_as(whole)
        return [update if layout is None else layout.take(update)]
