"""Builds the optimizer of a run from its config.

Every built-in optimizer honours `found_inf`, the attribute with which torch's GradScaler makes a fused optimizer skip
an update: where this tensor is 1, step() changes no parameter, no optimizer state and no step count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gptmill.config.optimizer import Lion as LionConfig
from gptmill.config.optimizer import Muon as MuonConfig
from gptmill.config.optimizer import OptimizerConfig
from gptmill.config.schema import list_values
from gptmill.runtime.parallel.layouts import Layout
from gptmill.runtime.world import World
from gptmill.training.optimizers.adamw import build_adamw
from gptmill.training.optimizers.adamw8bit import build_adamw8bit
from gptmill.training.optimizers.container import OptimizerContainer as OptimizerContainer
from gptmill.training.optimizers.lion import Lion
from gptmill.training.optimizers.muon import Muon
from gptmill.training.optimizers.param_groups import list_packed_splits, make_param_groups, uses_muon
from gptmill.training.optimizers.sharded import ShardedOptimizer
from gptmill.training.optimizers.split import SplitOptimizer
from gptmill.training.optimizers.split_muon import SplitMuon

Members = list[torch.optim.Optimizer]
Builder = Callable[[nn.Module, OptimizerConfig, torch.device], Members]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    world: World | None = None,
    layouts: Mapping[str, Layout] | None = None,
    *,
    is_exact: bool = False,
) -> OptimizerContainer:
    """The configured optimizer for all parameters of the model; with zero1, sharded over the ranks where it can be.

    Some parameters may be split over ranks by `layouts`. An exact one rounds the same however the parameters are
    divided among ranks.
    """
    tag = config.optimizer.tag
    members = OPTIMIZERS[tag](model, config, device)
    for member in members:
        if isinstance(member, Muon):
            member.batches_parameters = not is_exact
    if world is not None and world.strategy == "zero1" and world.size > 1 and tag in PER_PARAMETER:
        return ShardedOptimizer(model, tag, members, world)
    if layouts:
        split = {model.get_parameter(name): layout for name, layout in layouts.items()}
        members = [SplitMuon(member, split) if isinstance(member, Muon) else member for member in members]
        return SplitOptimizer(model, tag, members, layouts)
    return OptimizerContainer(model, tag, members)


def _build_adamw(model: nn.Module, config: OptimizerConfig, device: torch.device) -> Members:
    return [build_adamw(model.parameters(), config, device)]


def _build_muon(model: nn.Module, config: OptimizerConfig, device: torch.device) -> Members:
    chosen, named = config.optimizer, dict(model.named_parameters())
    assert isinstance(chosen, MuonConfig)
    matrices = [parameter for name, parameter in named.items() if uses_muon(name, parameter)]
    others = [parameter for name, parameter in named.items() if not uses_muon(name, parameter)]
    packed_splits = {named[name]: rows for name, rows in list_packed_splits(model).items()}
    groups = make_param_groups(matrices, chosen.matrix_lr, config.weight_decay)
    return [
        Muon(groups, chosen.matrix_lr, chosen.muon_momentum, packed_splits),
        build_adamw(others, config, device),
    ]


def _build_lion(model: nn.Module, config: OptimizerConfig, _device: torch.device) -> Members:
    chosen = config.optimizer
    assert isinstance(chosen, LionConfig)
    groups = make_param_groups(model.parameters(), config.max_lr, config.weight_decay)
    return [Lion(groups, config.max_lr, (chosen.beta1, chosen.beta2))]


def _build_adamw8bit(model: nn.Module, config: OptimizerConfig, _device: torch.device) -> Members:
    return [build_adamw8bit(model.parameters(), config)]


def make_own_builder(target: Any) -> Builder:
    """The builder of a plug-in's optimizer.

    `target` is a torch.optim.Optimizer, which gets the parameter groups, lr and its options by name; or a function of
    the model and the OptimizerConfig that returns one optimizer or several.
    """

    def build(model: nn.Module, config: OptimizerConfig, _device: torch.device) -> Members:
        if isinstance(target, type) and issubclass(target, torch.optim.Optimizer):
            groups = make_param_groups(model.parameters(), config.max_lr, config.weight_decay)
            return [target(groups, lr=config.max_lr, **list_values(config.optimizer))]  # type: ignore[call-arg]
        built = target(model, config)
        return list(built) if isinstance(built, list | tuple) else [built]

    return build


# A plug-in's optimizer may relate parameters to each other, and is not sharded.
PER_PARAMETER = ("adamw", "muon", "lion", "adamw8bit")
OPTIMIZERS: dict[str, Builder] = {
    "adamw": _build_adamw,
    "muon": _build_muon,
    "lion": _build_lion,
    "adamw8bit": _build_adamw8bit,
}
