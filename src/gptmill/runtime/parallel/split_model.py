"""Splits a model over the inner axes of a mesh, and measures the gradients of one that is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    return layouts


@torch.no_grad()
def average_split_gradients(parameters: Mapping[str, nn.Parameter], names: Iterable[str], world: World) -> None:
    """Does for experts what DDP does for all other parameters.

    Their gradients hold the tokens of all ranks that share the experts, so that they are summed over copies only.
    """
    for name in names:
        gradient = parameters[name].grad
        assert gradient is not None, f"{name} has no gradient"
        world.all_reduce_sum(gradient, REPLICATE).div_(world.gradient_size)


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
