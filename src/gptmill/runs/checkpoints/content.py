"""What a checkpoint is, in memory. Knows no files' formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError

SHOWN = 3  # of many names that are wrong in the same way


@dataclass(frozen=True)
class Checkpoint:
    """A run's state at a step: groups of named tensors, and the rest as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """What can be told of a checkpoint without loading it."""

    path: Path
    step: int
    size_bytes: int
    saved_at: float
    train_loss: float | None
    val_loss: float | None


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: str) -> None:
    """Raises UserError unless `found`, read from `place`, has the names, shapes and types of `expected`."""
    both = sorted(found.keys() & expected.keys())
    complaints = {
        "missing:": sorted(expected.keys() - found.keys()),
        "unknown:": [f"{name!r:.100}" for name in sorted(found.keys() - expected.keys())],
        "of another shape:": [
            f"{name} is {_show(found[name])}, not {_show(expected[name])}"
            for name in both
            if found[name].shape != expected[name].shape
        ],
        "of another type:": [
            f"{name} is {found[name].dtype}, not {expected[name].dtype}"
            for name in both
            if found[name].dtype != expected[name].dtype
        ],
    }
    if any(complaints.values()):
        reasons = "; ".join(f"{what} {_enumerate(names)}" for what, names in complaints.items() if names)
        raise UserError(f"the tensors in {place} are not those of its config: {reasons}; use another checkpoint")


def _show(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


def _enumerate(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
