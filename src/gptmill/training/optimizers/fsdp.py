"""FsdpOptimizer: each rank updates its part of every parameter of a model that FSDP has sharded."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gptmill.config.optimizer import OptimizerConfig
from gptmill.runtime.parallel.local_shards import wrap_like
from gptmill.runtime.parallel.mesh import SHARD
from gptmill.runtime.world import World
from gptmill.training.optimizers import OPTIMIZERS, Members
from gptmill.training.optimizers.container import OptimizerContainer
from gptmill.training.optimizers.local_view import LocalView
from gptmill.training.optimizers.muon import Muon
from gptmill.training.optimizers.sharded_muon import ShardedMuon


def build_fsdp_optimizer(model: nn.Module, config: OptimizerConfig, world: World) -> FsdpOptimizer:
    """The configured optimizer for the parts that this rank has of a sharded model."""
    tag, view = config.optimizer.tag, LocalView(model)
    members = OPTIMIZERS[tag](view, config, world.device)
    return FsdpOptimizer(view, tag, _shard_muon(members, view), world)


def _shard_muon(members: Members, view: LocalView) -> Members:
    """Muon needs whole matrices."""
    return [ShardedMuon(member, view.sources) if isinstance(member, Muon) else member for member in members]


class FsdpOptimizer(OptimizerContainer):
    """Its state is sharded as the parameters are, and its `state_tensors` say so."""

    def __init__(self, view: LocalView, kind: str, members: Members, world: World) -> None:
        super().__init__(view, kind, members)
        self._view = view
        self._world = world
        self._is_bound = False

    def step(self) -> None:
        self._bind()
        super().step()

    def step_unless(self, found_inf: Tensor) -> None:
        self._bind()
        super().step_unless(found_inf)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """As on one rank; all ranks learn whether any of them found a gradient that is not finite."""
        self._bind()
        super().unscale(scaler)
        if scaler.is_enabled():
            for member in self.members:
                for found_inf in scaler._found_inf_per_device(member).values():
                    self._world.all_reduce_sum(found_inf)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """As on one rank: the norm is that of the whole gradients."""
        self._bind()
        parameters = [parameter for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self._world.axis_size(SHARD) > 1:
            norm = self._world.all_reduce_sum(norm.square(), SHARD).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, math.inf if max_norm is None else max_norm, norm)
        return norm

    def zero_grad(self) -> None:
        """Frees the gradients; FSDP makes new ones."""
        self._view.zero_grad()
        self._is_bound = False

    @torch.no_grad()
    def init_state(self) -> None:
        self._is_bound = True  # to the zero gradients of the step that creates the state
        super().init_state()

    def state_tensors(self) -> dict[str, Tensor]:
        """As on one rank, with global names and shapes; what has the shape of a parameter is sharded like it."""
        whole = self._view.whole
        local = super().state_tensors()
        return {name: wrap_like(tensor, whole[name.rpartition("/")[0]]) for name, tensor in local.items()}

    def _count(self, parameter: nn.Parameter) -> int:
        return self._view.sources[parameter].numel()

    def _bind(self) -> None:
        """Once per step: the host has better things to do."""
        if not self._is_bound:
            self._view.bind()
            self._is_bound = True
