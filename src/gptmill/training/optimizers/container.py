"""OptimizerContainer: the optimizers of a model, each with its own parameters, used as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Described, Held
from gptmill.runs.checkpoints.sharded_state import Saved, hold, load


class OptimizerContainer:
    """Updates all parameters of a model. Every group has its own peak_lr; all follow the same schedule."""

    is_sharded = False
    """Whether each rank updates some of the parameters only; see optimizers.sharded."""

    def __init__(self, model: nn.Module, kind: str, members: Iterable[torch.optim.Optimizer]) -> None:
        self.kind = kind
        self.members = tuple(members)
        self.keeps_gradients = False
        """Whether zero_grad() zeroes gradients in place, as captured CUDA graphs need, instead of freeing them."""
        self._parameters = dict(model.named_parameters())
        held = [parameter for group in self._groups for parameter in group["params"]]
        if len(held) != len(self._parameters) or set(held) != set(self._parameters.values()):
            raise UserError(f"optimizer {kind} must update every parameter of the model exactly once; fix its groups")
        for group in self._groups:
            group.setdefault("peak_lr", group["lr"])
            group.setdefault("weight_decay", 0.0)

    def set_lr(self, lr: float, max_lr: float) -> None:
        """Sets each group's learning rate to its own peak times `lr / max_lr`."""
        for group in self._groups:
            peak = group["peak_lr"]
            _set_group_lr(group, lr if peak == max_lr else peak * (lr / max_lr))

    def step(self) -> None:
        """Updates all parameters."""
        for member in self.members:
            member.step()

    def step_unless(self, found_inf: Tensor) -> None:
        """Updates all parameters, or nothing where `found_inf` is set. On CUDA the device decides, without a sync."""
        if found_inf.device.type == "mps":
            # The fused kernel ignored found_inf until pytorch/pytorch#186360; on MPS the host reads every step anyway.
            if not found_inf.item():
                self.step()
            return
        flag = found_inf.float()
        for member in self.members:
            if not honours_found_inf(member):
                if not found_inf.item():  # a plug-in's optimizer: the host has to look
                    member.step()
                continue
            vars(member)["found_inf"] = flag
            member.step()
            del vars(member)["found_inf"]

    def zero_grad(self) -> None:
        """Frees the gradients, or zeroes them in place (see `keeps_gradients`)."""
        for member in self.members:
            member.zero_grad(set_to_none=not self.keeps_gradients)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divides the gradients by fp16's loss scale."""
        for member in self.members:
            scaler.unscale_(member)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Clips the gradients to a norm of at most `max_norm`; returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters.values(), math.inf if max_norm is None else max_norm)

    def share_weights(self) -> None:
        """Sends updated weights to the ranks that do not have them: none, unless the optimizer is sharded."""

    @torch.no_grad()
    def init_state(self) -> None:
        """Creates the optimizer state before the first step, so that its memory is known and it can be loaded.

        Takes a step with zero gradients at a learning rate of 0, then resets the step counts: no weight changes.
        """
        rates = [group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"] for group in self._groups]
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.set_lr(0.0, 1.0)
        self.step()
        self.zero_grad()
        for group, rate in zip(self._groups, rates, strict=True):
            _set_group_lr(group, rate)
        for name, tensor in self.state_tensors().items():
            if name.endswith("/step"):
                tensor.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """The live optimizer state as PARAMETER/KEY; tensor subclasses are split into their plain tensors.

        Names stay valid when the order of the parameters changes; indices would not.
        """
        states = {parameter: state for member in self.members for parameter, state in member.state.items()}
        return {
            f"{name}/{key}": tensor
            for name, parameter in self._parameters.items()
            for own, value in states.get(parameter, {}).items()
            for key, tensor in _flatten(own, value)
        }

    def describe_state(self) -> Mapping[str, Described]:
        """The shapes and dtypes of the whole state, also of what other ranks have."""
        return self.state_tensors()

    def hold_state(self) -> dict[str, Held]:
        """The live optimizer state that this rank has, for a checkpoint."""
        return hold(self.state_tensors())

    def load_state(self, tensors: Mapping[str, Saved]) -> None:
        """Copies saved state in. Call init_state() before; the caller checks names and shapes."""
        held = self.hold_state()
        assert held.keys() <= tensors.keys(), "the state is that of another optimizer, or init_state() was not called"
        load(held, tensors)

    @torch.no_grad()
    def reset_state(self) -> None:
        """Resets the optimizer state to that before the first step."""
        for member in self.members:
            member.state.clear()
        self.init_state()

    def describe(self) -> str:
        """One line: which optimizer updates how many parameters, with which weight decay."""
        return "; ".join(
            f"{type(member).__name__} {_describe_decay(group['weight_decay'])}: {len(group['params']):,} tensors, "
            f"{sum(map(self._count, group['params'])):,} parameters"
            for member in self.members
            for group in member.param_groups
        )

    def _count(self, parameter: nn.Parameter) -> int:
        """The numbers of a whole parameter."""
        return parameter.numel()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]


def _set_group_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):  # torchao's compiled step holds on to this tensor
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _describe_decay(weight_decay: float) -> str:
    return f"with decay {weight_decay:g}" if weight_decay else "without decay"


def honours_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() skips the update where `found_inf` is set. Torch marks its fused ones by an attribute."""
    is_built_in = type(optimizer).__module__.startswith(("gptmill.", "torchao."))
    return is_built_in or bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _flatten(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Splits a tensor subclass into its plain tensors, since files hold plain tensors only."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"the optimizer keeps {name!r} as {type(value).__name__}; keep all of its state in tensors, or a resumed "
            f"run could not restore it"
        )
    if not hasattr(value, "__tensor_flatten__"):
        return [(name, value)]
    parts, _ = value.__tensor_flatten__()
    return [pair for part in parts for pair in _flatten(f"{name}.{part}", getattr(value, part))]
