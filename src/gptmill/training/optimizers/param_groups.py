"""Which parameters are decayed, which are Muon's, which are several matrices in one: told by names and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

TRUNKS = ("blocks", "extra_blocks")


def list_decay_groups(parameters: Iterable[nn.Parameter], peak_lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (embeddings and stacks of matrices included) with decay; biases, norms and other vectors without."""
    held = list(parameters)
    matrices, vectors = [p for p in held if p.dim() >= 2], [p for p in held if p.dim() < 2]
    return [
        {"params": chosen, "lr": peak_lr, "peak_lr": peak_lr, "weight_decay": decay}
        for chosen, decay in ((matrices, weight_decay), (vectors, 0.0))
        if chosen
    ]


def is_muons(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a block. A router is none: its rows are experts, each on its own."""
    return parameter.dim() >= 2 and name.split(".")[0] in TRUNKS and not name.endswith("router.weight")


def list_packed_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names of the parameters that are several matrices above each other, and how many rows each of these has.

    A module tells of those below it in an attribute, such as fused_rows = {"qkv.weight": (768, 768, 768)}.
    """
    fused: dict[str, tuple[int, ...]] = {}
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        fused |= {f"{prefix}{name}": tuple(rows) for name, rows in getattr(module, "packed_splits", {}).items()}
    return fused
