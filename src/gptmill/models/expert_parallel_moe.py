"""A mixture of experts of which this process holds some; tokens travel to the others (expert parallelism).

Shape suffixes: M dispatched tokens, E experts, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from gptmill.models.mixture_of_experts import MixtureOfExperts


class TokenExchange(Protocol):
    """Takes tokens to the processes of their experts, and the results back."""

    def run(self, x_MC: Tensor, ends_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The results for tokens that are sorted by expert; `experts` are this process's own."""
        ...


class ExpertParallelMoe(MixtureOfExperts):
    """The router of all experts, and the weights of some."""

    exchange: TokenExchange

    def run_experts(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        return self.exchange.run(x_MC, ends_E, super().run_experts)


def share_experts(model: nn.Module, exchange: TokenExchange) -> None:
    """Makes the model's mixtures exchange tokens; their weights are those of this process's experts by now."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.__class__ = ExpertParallelMoe
            assert isinstance(module, ExpertParallelMoe)
            module.exchange = exchange
