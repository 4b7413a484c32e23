"""Splits a model over the inner axes of a mesh, and measures the gradients of one that is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gptmill.runtime.parallel.expert_parallel import split_experts
from gptmill.runtime.parallel.layouts import Layout
from gptmill.runtime.parallel.mesh import REPLICATE
from gptmill.runtime.parallel.tensor_parallel import split_tensors
from gptmill.runtime.world import EP, TP, World


def split_model(model: nn.Module, world: World) -> dict[str, Layout]:
    """Leaves this rank its share of the weights; returns how each parameter was split, by name."""
    layouts: dict[str, Layout] = {}
    if world.axis_size(TP) > 1:
        layouts |= split_tensors(model, world.find_group(TP))
    if world.axis_size(EP) > 1:
        layouts |= split_experts(model, world.find_group(EP))
    # The first ranks fill one group of each kind.
    is_saved = world.rank < world.axis_size(TP) * world.axis_size(EP)
    return {name: replace(layout, is_saved=is_saved) for name, layout in layouts.items()}


def list_experts(layouts: Mapping[str, Layout], world: World) -> list[str]:
    """The parameters that are split over the axis of experts."""
    group = world.find_group(EP) if world.axis_size(EP) > 1 else None
    return [name for name, layout in layouts.items() if layout.group is group]


@torch.no_grad()
def average_experts(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Does for the gradients of experts what DDP does for all others.

    They hold the tokens of all ranks that share the experts, so that they are summed over copies only.
    """
    for parameter in parameters:
        assert parameter.grad is not None, "every expert has a gradient, if only zeros"
        world.all_reduce_sum(parameter.grad, REPLICATE).div_(world.gradient_size)


@torch.no_grad()
def clip_gradients(parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], max_norm: float) -> Tensor:
    """Scales the gradients down to a norm, that of the whole model on every rank; returns their norm before."""
    replicated: list[Tensor] = []
    split: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            alike = split.setdefault(layouts[name].group, []) if name in layouts else replicated
            alike.append(parameter.grad)
    square = get_total_norm(replicated).square()
    for group, gradients in split.items():
        part = get_total_norm(gradients).square()
        dist.all_reduce(part, group=group)
        square = square + part
    norm = square.sqrt()
    clip_grads_with_norm_(parameters.values(), max_norm, norm)
    return norm
