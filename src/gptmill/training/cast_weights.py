"""The cast weight cache: weights in the dtype of their GEMMs, cast once per step instead of once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gptmill.models.fused.fp8_layers import Fp8Linear, find_head_format
from gptmill.models.gpt import GPT
from gptmill.models.kernels.accumulate import accumulate

TIED_HEAD = "tied_head_copy"  # the buffer in which GPT looks for a tied head's copy


class CastWeightCache:
    """Copies of a model's matrices that stand in for them in forward and backward; gradients go to the originals."""

    def __init__(self, model: GPT, dtype: torch.dtype | None) -> None:
        """Without a dtype there are no copies."""
        self.parameters = list(model.parameters())
        self._originals = {} if dtype is None else _list_matrices(model)
        self.copies = {name: weight.detach().to(dtype).requires_grad_() for name, weight in self._originals.items()}
        replaced = {id(weight) for name, weight in self._originals.items() if name != TIED_HEAD}
        self._kept = [parameter for parameter in self.parameters if id(parameter) not in replaced]

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the current weights."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self._originals.values()))

    def add_gradients(self, objective: Tensor) -> None:
        """Accumulates gradients, as `objective.backward()` does in a model without copies."""
        kept, copied = self._kept, list(self.copies.values())
        gradients = torch.autograd.grad(objective, [*kept, *copied], materialize_grads=True)
        torch._foreach_add_(_list_gradients(kept), list(gradients[: len(kept)]))
        accumulate(_list_gradients(self._originals.values()), gradients[len(kept) :])


def _list_matrices(model: GPT) -> dict[str, Tensor]:
    """The weights of linear layers, and the embedding as a tied head; not those of fp8, quantized from fp32."""
    has_fp8_head = find_head_format(model) is not None
    found = {TIED_HEAD: model.token_embedding.weight} if model.head is None and not has_fp8_head else {}
    for name, module in model.named_modules():
        is_fp8 = isinstance(module, Fp8Linear) or (module is model.head and has_fp8_head)
        if isinstance(module, nn.Linear) and not is_fp8:
            found[f"{name}.weight"] = module.weight
    return found


def _list_gradients(weights: Iterable[Tensor]) -> list[Tensor]:
    gradients = []
    for weight in weights:
        assert weight.grad is not None, "gradients to accumulate into must exist"
        gradients.append(weight.grad)
    return gradients
