"""OptimizerSet: one or several optimizers that hold a model's parameters between them, used as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class OptimizerContainer:
    """Updates all of a model. Every group of parameters has its own peak_lr, and follows the same schedule."""

    def __init__(self, model: nn.Module, kind: str, members: Iterable[torch.optim.Optimizer]) -> None:
        self.kind = kind
        self.members = tuple(members)
        self.keeps_gradients = False
        """Whether they are set to 0 where they are, for what writes to these very places."""
        self._parameters = dict(model.named_parameters())
        held = [parameter for group in self._groups for parameter in group["params"]]
        assert len(held) == len(self._parameters), "every parameter has one optimizer"
        assert set(held) == set(self._parameters.values()), "every parameter has one optimizer"

    def set_lr(self, lr: float, max_lr: float) -> None:
        """Brings every group as far below its own peak as `lr` is below `max_lr`."""
        for group in self._groups:
            peak = group["peak_lr"]
            _set_rate(group, lr if peak == max_lr else peak * (lr / max_lr))

    def step(self) -> None:
        """Updates."""
        for member in self.members:
            member.step()

    def step_unless(self, is_bad: Tensor) -> None:
        """Updates, or leaves everything as it is where `is_bad` holds. On CUDA the device decides, and no one waits."""
        if is_bad.device.type == "mps":
            # Its fused kernel ignored found_inf until pytorch/pytorch#186360; the host reads every step there anyway.
            if not is_bad.item():
                self.step()
            return
        assert all(group.get("fused", True) for group in self._groups), "this optimizer cannot leave an update out"
        found_inf = is_bad.float()
        for member in self.members:
            vars(member)["found_inf"] = found_inf
            member.step()
            del vars(member)["found_inf"]

    def zero_grad(self) -> None:
        """Lets the gradients go."""
        for member in self.members:
            member.zero_grad(set_to_none=not self.keeps_gradients)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divides the gradients by what fp16 multiplied the loss with."""
        for member in self.members:
            scaler.unscale_(member)

    @torch.no_grad()
    def init_state(self) -> None:
        """Makes all that the optimizers keep, before the first step: its memory is known, and it can be loaded into.

        It is a step without gradient at a rate of 0, which is then not counted: no weight changes.
        """
        rates = [group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"] for group in self._groups]
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.set_lr(0.0, 1.0)
        self.step()
        self.zero_grad()
        for group, rate in zip(self._groups, rates, strict=True):
            _set_rate(group, rate)
        for name, tensor in self.state_tensors().items():
            if name.endswith("/step"):
                tensor.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """All that the optimizers keep, called PARAMETER/KEY: the live tensors, and the plain ones that others hold.

        Names outlive the order of parameters, indices do not.
        """
        states = {parameter: state for member in self.members for parameter, state in member.state.items()}
        return {
            f"{name}/{key}": tensor
            for name, parameter in self._parameters.items()
            for own, value in states.get(parameter, {}).items()
            for key, tensor in _flatten(own, value)
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Becomes what was saved; primed before, and names and shapes are the caller's to check."""
        live = self.state_tensors()
        assert live.keys() == tensors.keys(), "the state is that of another optimizer, or of one that was not primed"
        for name, tensor in live.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def forget(self) -> None:
        """Goes back to what it was before the first step."""
        for member in self.members:
            member.state.clear()
        self.init_state()

    def describe(self) -> str:
        """One line: what updates how many parameters, with which decay."""
        return "; ".join(
            f"{type(member).__name__} {_name_decay(group['weight_decay'])}: {len(group['params']):,} tensors, "
            f"{sum(parameter.numel() for parameter in group['params']):,} parameters"
            for member in self.members
            for group in member.param_groups
        )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # torchao compiles its step around this very tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _name_decay(weight_decay: float) -> str:
    return f"with decay {weight_decay:g}" if weight_decay else "without decay"


def _flatten(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor that is made of others as these: files know plain ones only."""
    if not hasattr(value, "__tensor_flatten__"):
        return [(name, value)]
    parts, _ = value.__tensor_flatten__()
    return [pair for part in parts for pair in _flatten(f"{name}.{part}", getattr(value, part))]
