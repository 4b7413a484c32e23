"""Expert parallelism: every rank holds some experts of each layer, and tokens travel to theirs and back.

No token is dropped: a rank receives as many as the routers send it. How many these are is read on the host, once per
layer, since collectives take their sizes there.

Shape suffixes: M tokens sorted by expert, S tokens received, E experts, L experts of this rank, R ranks, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmill.runtime.parallel.collectives import all_to_all, send_rows
from gptmill.runtime.parallel.layouts import Layout

EXPERT_WEIGHTS = ("gate_up", "down_proj")


def split_experts(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Leaves this rank its experts of every mixture; returns how each parameter was split, by name."""
    layouts: dict[str, Layout] = {}
    for path, module in list(model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        for name in EXPERT_WEIGHTS:
            if name in own:
                layout = layouts[f"{path}.{name}"] = Layout(0, (len(own[name]),), group)
                setattr(module, name, nn.Parameter(layout.take(own[name].detach())))
    return layouts


@dataclass(frozen=True)
class RankExperts:
    """Takes tokens to the ranks of their experts, each of which has equally many, and the results back."""

    group: dist.ProcessGroup

    def run(self, x_MC: Tensor, ends_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The results for tokens that are sorted by expert; `experts` are this rank's own."""
        size = self.group.size()
        counts_RL = ends_E.diff(prepend=ends_E.new_zeros(1)).view(size, -1)
        ones = [1] * size
        theirs_RL = all_to_all(counts_RL, ones, ones, self.group)
        sent, received = torch.stack([counts_RL.sum(dim=1), theirs_RL.sum(dim=1)]).tolist()
        x_SC = send_rows(x_MC, sent, received, self.group)
        order_S = sort_by_expert(theirs_RL)
        ends_L = theirs_RL.sum(dim=0).cumsum(dim=0, dtype=torch.int32)
        y_SC = experts(x_SC.index_select(0, order_S), ends_L)
        return send_rows(y_SC.index_select(0, order_S.argsort()), received, sent, self.group)


def sort_by_expert(counts_RL: Tensor) -> Tensor:
    """The order that sorts tokens by expert, which came sorted by rank and, from each, by expert."""
    experts_L = torch.arange(counts_RL.shape[1], device=counts_RL.device)
    experts_S = experts_L.repeat(len(counts_RL)).repeat_interleave(counts_RL.flatten())
    return experts_S.sort(stable=True).indices
