"""Exponential moving average (EMA) of the weights, which evaluates better than they do at a high learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gptmill.runtime.parallel.local_shards import copy_whole, reshard, to_local


class EmaWeights:
    """ema = decay * ema + (1 - decay) * weights after every update, starting as a copy of the weights."""

    def __init__(self, ema: dict[str, Tensor], decay: float) -> None:
        self._ema = ema
        self._decay = decay

    @classmethod
    def build(cls, model: nn.Module, decay: float) -> EmaWeights:
        """The EMA of a model before its first update."""
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert all(weight.dtype == torch.float32 for weight in weights.values()), "weights are trained in fp32"
        return cls({name: weight.clone() for name, weight in weights.items()}, decay)

    @torch.no_grad()
    def update(self, model: nn.Module, found_inf: Tensor | None = None) -> None:
        """Averages in the weights, unless `found_inf` is set: then the update was skipped.

        The device decides, without synchronisation. The weights must be finite even if the update was skipped.
        """
        ema, weights = [to_local(tensor) for tensor in self._ema.values()], list(_list_weights(model).values())
        if found_inf is None:
            torch._foreach_lerp_(ema, weights, 1 - self._decay)
        else:
            rate = found_inf.logical_not() * (1 - self._decay)
            torch._foreach_lerp_(ema, weights, [rate] * len(ema))

    def tensors(self) -> dict[str, Tensor]:
        """The live EMA tensors by parameter name, sharded like the parameters."""
        return dict(self._ema)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies saved tensors in; the caller checks names and shapes."""
        assert tensors.keys() == self._ema.keys(), "the EMA is that of another model"
        for name, tensor in self._ema.items():
            copy_whole(tensor, tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Exchanges the model's weights with the EMA within the context, and restores both bit for bit.

        Copies values and keeps storages, so that compiled and DDP-wrapped models stay valid. Needs the extra memory of
        one parameter only.
        """
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            reshard(model)
            for name, weight in _list_weights(model).items():
                tensor = to_local(self._ema[name])
                _exchange(weight, tensor)
                swapped.append((weight, tensor))
            yield
        finally:
            reshard(model)
            for weight, tensor in swapped:
                _exchange(weight, tensor)


def _list_weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each weight, which is all of it unless the model is sharded."""
    return {name: to_local(parameter) for name, parameter in model.named_parameters()}


def _exchange(one: Tensor, other: Tensor) -> None:
    copy = one.clone()
    one.copy_(other)
    other.copy_(copy)
