"""Weights in the format that they are multiplied in: made once for all micro-batches of a step, not in each of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gptmill.models.fp8 import Fp8Linear
from gptmill.models.gpt import GPT
from gptmill.models.kernels.accumulate import accumulate

HEAD = "head_copy"  # of a tied head, which the model looks for under this name


class CastWeightCache:
    """Copies of a model's matrices, to take their places while it is trained; gradients go to the weights' own."""

    def __init__(self, model: GPT, dtype: torch.dtype | None) -> None:
        """There are none where no format is given."""
        self.parameters = list(model.parameters())
        self._originals = {} if dtype is None else _list_matrices(model)
        self.copies = {name: weight.detach().to(dtype).requires_grad_() for name, weight in self._originals.items()}
        replaced = {id(weight) for name, weight in self._originals.items() if name != HEAD}
        self._kept = [parameter for parameter in self.parameters if id(parameter) not in replaced]

    @torch.no_grad()
    def renew(self) -> None:
        """Copies the weights as they are now."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self._originals.values()))

    def add_gradients(self, objective: Tensor) -> None:
        """What `objective.backward()` does to a model without copies."""
        kept, copied = self._kept, list(self.copies.values())
        gradients = torch.autograd.grad(objective, [*kept, *copied], materialize_grads=True)
        torch._foreach_add_(_list_gradients(kept), list(gradients[: len(kept)]))
        accumulate(_list_gradients(self._originals.values()), gradients[len(kept) :])


def _list_matrices(model: GPT) -> dict[str, Tensor]:
    """Those of linear layers, and the embedding as a tied head; but for fp8's, which are scaled in fp32."""
    found = {HEAD: model.token_embedding.weight} if model.head is None and model.head_format is None else {}
    for name, module in model.named_modules():
        is_narrower = isinstance(module, Fp8Linear) or (module is model.head and model.head_format is not None)
        if isinstance(module, nn.Linear) and not is_narrower:
            found[f"{name}.weight"] = module.weight
    return found


def _list_gradients(weights: Iterable[Tensor]) -> list[Tensor]:
    gradients = []
    for weight in weights:
        assert weight.grad is not None, "what is added to must be there"
        gradients.append(weight.grad)
    return gradients
