"""WeightAverage: a moving average of the weights, which evaluates better than they do while the rate is high."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every update; it starts as the weights."""

    def __init__(self, averages: dict[str, Tensor], decay: float) -> None:
        self._averages = averages
        self._decay = decay

    @classmethod
    def build(cls, model: nn.Module, decay: float) -> WeightAverage:
        """The average of a model that has not been updated yet."""
        weights = _list_weights(model)
        assert all(weight.dtype == torch.float32 for weight in weights.values()), "weights are trained in fp32"
        return cls({name: weight.clone() for name, weight in weights.items()}, decay)

    @torch.no_grad()
    def update(self, model: nn.Module, is_bad: Tensor | None = None) -> None:
        """Takes in the weights, unless `is_bad` holds: an update that was left out counts for nothing.

        The device decides and no one waits. Weights must be finite even then, as those that were left alone are.
        """
        averages, weights = list(self._averages.values()), list(_list_weights(model).values())
        if is_bad is None:
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
        else:
            rate = is_bad.logical_not() * (1 - self._decay)
            torch._foreach_lerp_(averages, weights, [rate] * len(averages))

    def tensors(self) -> dict[str, Tensor]:
        """The averages by the names of the parameters: the live ones."""
        return dict(self._averages)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Becomes what was saved; names and shapes are the caller's to check."""
        assert tensors.keys() == self._averages.keys(), "averages are those of another model"
        for name, average in self._averages.items():
            average.copy_(tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights, and tensors() the model's own; both come back bit for bit.

        Values move, storages stay, so that compiled and wrapped models go on; one parameter's copy is all it costs.
        """
        moved: list[tuple[Tensor, Tensor]] = []
        try:
            for name, weight in _list_weights(model).items():
                _exchange(weight, self._averages[name])
                moved.append((weight, self._averages[name]))
            yield
        finally:
            for weight, average in moved:
                _exchange(weight, average)


def _list_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
