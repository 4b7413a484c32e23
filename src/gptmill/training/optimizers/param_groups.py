"""Parameter groups: which parameters get weight decay, which Muon updates, and which pack several matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

BLOCK_PREFIXES = ("blocks", "extra_blocks")


def make_param_groups(parameters: Iterable[nn.Parameter], peak_lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, embeddings and stacks of matrices with weight decay; biases, norms and other vectors without."""
    listed = list(parameters)
    matrices, vectors = [p for p in listed if p.dim() >= 2], [p for p in listed if p.dim() < 2]
    return [
        {"params": chosen, "lr": peak_lr, "peak_lr": peak_lr, "weight_decay": decay}
        for chosen, decay in ((matrices, weight_decay), (vectors, 0.0))
        if chosen
    ]


def uses_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a block, except routers, whose rows are independent experts."""
    return parameter.dim() >= 2 and name.split(".")[0] in BLOCK_PREFIXES and not name.endswith("router.weight")


def list_packed_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameters that stack several matrices, and the number of rows of each matrix.

    Modules declare theirs in an attribute, such as packed_splits = {"qkv.weight": (768, 768, 768)}.
    """
    splits: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        splits |= {f"{prefix}{name}": tuple(rows) for name, rows in getattr(module, "packed_splits", {}).items()}
    return splits
