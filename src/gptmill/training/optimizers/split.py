"""SplitOptimizer: updates this rank's share of a model whose weights are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmill.runs.checkpoints.content import Described, Held
from gptmill.runs.checkpoints.sharded_state import hold
from gptmill.runtime.parallel.layouts import Layout
from gptmill.runtime.parallel.split_model import clip_gradients
from gptmill.training.optimizers.container import OptimizerContainer


class SplitOptimizer(OptimizerContainer):
    """Every weight is updated by itself, so that a share is updated as the whole would be; only norms need all."""

    def __init__(
        self, model: nn.Module, kind: str, members: list[torch.optim.Optimizer], layouts: Mapping[str, Layout]
    ) -> None:
        super().__init__(model, kind, members)
        self._layouts = layouts

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """As on one rank; all ranks learn whether any of them found a gradient that is not finite."""
        super().unscale(scaler)
        if scaler.is_enabled():
            for member in self.members:
                for found_inf in scaler._found_inf_per_device(member).values():
                    dist.all_reduce(found_inf)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        return clip_gradients(self._parameters, self._layouts, math.inf if max_norm is None else max_norm)

    def describe_state(self) -> Mapping[str, Described]:
        return self.hold_state()

    def hold_state(self) -> dict[str, Held]:
        """The live state, split as its parameters are."""
        return hold(self.state_tensors(), self._layouts)
