"""The part of a model that is compressed: the matrices of its blocks. Embeddings, norms, biases and the LM head, which
by default is the token embedding, stay as they are, and so does a mixture's router."""

from __future__ import annotations

from torch import Tensor, nn

from gptmill.models.mixture_of_experts import MixtureOfExperts

BLOCKS = "blocks."


def list_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks by name, without routers."""
    modules = dict(model.named_modules())
    routers = {id(module.router) for module in modules.values() if isinstance(module, MixtureOfExperts)}
    return {
        name: module
        for name, module in modules.items()
        if name.startswith(BLOCKS) and isinstance(module, nn.Linear) and id(module) not in routers
    }


def list_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The weights of those layers by the names of their parameters, and the experts' matrices."""
    found: dict[str, Tensor] = {f"{name}.weight": linear.weight for name, linear in list_linears(model).items()}
    for name, module in model.named_modules():
        if name.startswith(BLOCKS) and isinstance(module, MixtureOfExperts):
            found |= {f"{name}.gate_up": module.gate_up, f"{name}.down_proj": module.down_proj}
    return found
