"""A checkpoint in memory. Knows no file formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError

MAX_LISTED = 3  # of the names with the same problem


@dataclass(frozen=True)
class Checkpoint:
    """A run's state at a step: groups of named tensors, and the rest as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint's manifest says, without loading tensors."""

    path: Path
    step: int
    size_bytes: int
    saved_at: float
    train_loss: float | None
    val_loss: float | None
    """None unless the model was evaluated at this very step."""


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str) -> None:
    """Raises UserError unless `found`, read from `source`, has the names, shapes and dtypes of `expected`."""
    both = sorted(found.keys() & expected.keys())
    problems = {
        "missing:": sorted(expected.keys() - found.keys()),
        "unexpected:": [f"{name!r:.100}" for name in sorted(found.keys() - expected.keys())],
        "different shape:": [
            f"{name} is {_format_shape(found[name])}, not {_format_shape(expected[name])}"
            for name in both
            if found[name].shape != expected[name].shape
        ],
        "different dtype:": [
            f"{name} is {found[name].dtype}, not {expected[name].dtype}"
            for name in both
            if found[name].dtype != expected[name].dtype
        ],
    }
    if any(problems.values()):
        reasons = "; ".join(f"{what} {_enumerate(names)}" for what, names in problems.items() if names)
        raise UserError(f"the tensors in {source} do not match its config: {reasons}; use another checkpoint")


def _format_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def _enumerate(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
