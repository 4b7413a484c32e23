"""ShardedOptimizer: ZeRO-1 (Rajbhandari et al. 2019, arXiv:1910.02054). Each rank updates the parameters it owns."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gptmill.runs.checkpoints.content import Held
from gptmill.runs.checkpoints.sharded_state import hold_alone
from gptmill.runtime.world import World
from gptmill.training.optimizers.container import OptimizerContainer
from gptmill.training.optimizers.ownership import Ownership


class ShardedOptimizer(OptimizerContainer):
    """Keeps optimizer state for the parameters of this rank only; for optimizers that treat each parameter by itself.

    Before an update, this rank's parameters have the gradients of all ranks, and the others none. After it,
    `share_weights` sends all weights to all ranks.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, kind: str, members: Iterable[torch.optim.Optimizer], world: World) -> None:
        super().__init__(model, kind, members)
        self.ownership = Ownership(model, world)
        self._world = world
        self._description = super().describe()
        self._group_parameters: list[list[nn.Parameter]] = [list(group["params"]) for group in self._groups]
        self._places = {parameter: place for place, parameter in enumerate(self.ownership.parameters)}
        # The shapes of other ranks' optimizer state.
        self._elsewhere: dict[str, Tensor] = {}
        self._select(world.rank)

    def describe(self) -> str:
        return self._description

    def zero_grad(self) -> None:
        """Frees the gradients of all parameters, not only of this rank's."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """As on one rank; all ranks learn whether any of them found a gradient that is not finite."""
        super().unscale(scaler)
        if not scaler.is_enabled():
            return
        states = [scaler._per_optimizer_states[id(member)] for member in self.members]
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        agreed = torch.stack(found).sum() if found else torch.zeros((), device=self._world.device)
        self._world.all_reduce_sum(agreed)
        for state in states:
            state["found_inf_per_device"] = {self._world.device: agreed}

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """As on one rank: the same norm of each parameter, added up in the same order."""
        own = self.ownership.own
        norms = torch.zeros(len(self.ownership.parameters), device=self._world.device)
        if own:
            gradients = [parameter.grad for parameter in own if parameter.grad is not None]
            assert len(gradients) == len(own), "every trainable parameter has a gradient"
            places = torch.tensor([self._places[parameter] for parameter in own])
            norms[places.to(norms.device, non_blocking=True)] = torch.stack(torch._foreach_norm(gradients))
        # Exact: each sum has one summand that is not 0.
        total: Tensor = torch.linalg.vector_norm(self._world.all_reduce_sum(norms))
        torch.nn.utils.clip_grads_with_norm_(own, math.inf if max_norm is None else max_norm, total)
        return total

    def share_weights(self) -> None:
        """Sends the weights from their owners to all ranks. Call it after an update."""
        self.ownership.share(self.ownership.parameters)

    @torch.no_grad()
    def init_state(self) -> None:
        """As on one rank. Also learns which state the other ranks keep, one of them at a time."""
        self._elsewhere.clear()
        for rank in range(self._world.size):
            if rank != self._world.rank:
                self._select(rank)
                super().init_state()
                self._elsewhere |= {name: tensor.to("meta") for name, tensor in self.own_state().items()}
                for member in self.members:
                    member.state.clear()
        self._select(self._world.rank)
        super().init_state()

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything by name, as on one rank. Live for this rank's parameters; of others the shapes."""
        found, order = {**self._elsewhere, **self.own_state()}, {name: i for i, name in enumerate(self._parameters)}
        return dict(sorted(found.items(), key=lambda item: order[_find_parameter(item[0])]))

    def own_state(self) -> dict[str, Tensor]:
        """The live state of this rank's parameters."""
        return super().state_tensors()

    def hold_state(self) -> dict[str, Held]:
        """The live state of this rank's parameters, which no other rank has."""
        return hold_alone(self.own_state())

    def _select(self, rank: int) -> None:
        """Lets the members see the parameters of a rank only."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        for group, parameters in zip(self._groups, self._group_parameters, strict=True):
            group["params"] = [parameter for parameter in parameters if self._find_owner(names[parameter]) == rank]

    def _find_owner(self, name: str) -> int:
        """A frozen parameter, which nothing updates, is rank 0's."""
        place = self._places.get(self._parameters[name])
        return 0 if place is None else self.ownership.owners[place]


def _find_parameter(name: str) -> str:
    """The parameter of a state tensor PARAMETER/KEY."""
    return name.partition("/")[0]
