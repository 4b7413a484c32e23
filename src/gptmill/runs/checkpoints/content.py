"""A checkpoint in memory. Knows no file formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gptmill.config.errors import UserError

MAX_LISTED = 3  # of the names with the same problem


@dataclass(frozen=True, eq=False)
class Shard:
    """The piece of a global tensor that lives on this rank; it may be empty, or all of the tensor."""

    tensor: Tensor
    """The local piece."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    offset: tuple[int, ...]
    """Of the piece's first element in the global tensor."""
    is_written: bool = True
    """Whether this rank saves the piece; False where another rank has the same one and saves that."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Of the local piece."""
        return int(self.tensor.nbytes)

    def cut(self, whole: Tensor) -> Tensor:
        """This piece's part of a tensor of the global shape, as a view."""
        spans = zip(self.offset, self.tensor.shape, strict=True)
        return whole[tuple(slice(start, start + length) for start, length in spans)]


Held: TypeAlias = Tensor | Shard
"""What a rank holds of a tensor. A plain one is whole and the same on every rank, and rank 0 saves it."""


class Described(Protocol):
    """What has the shape and dtype of a tensor: a tensor, a shard (of the whole one), or one in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


T = TypeVar("T", bound=Described, covariant=True)


@dataclass(frozen=True)
class Checkpoint(Generic[T]):
    """A run's state at a step: groups of named tensors, and the rest as JSON."""

    step: int
    tensors: Mapping[str, Mapping[str, T]]
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


def check_tensors(found: Mapping[str, Described], expected: Mapping[str, Described], source: str) -> None:
    """Raises UserError unless `found`, read from `source`, has the names, shapes and dtypes of `expected`."""
    both = sorted(found.keys() & expected.keys())
    problems = {
        "missing:": sorted(expected.keys() - found.keys()),
        "unexpected:": [f"{name!r:.100}" for name in sorted(found.keys() - expected.keys())],
        "different shape:": [
            f"{name} is {_format_shape(found[name])}, not {_format_shape(expected[name])}"
            for name in both
            if tuple(found[name].shape) != tuple(expected[name].shape)
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


def _format_shape(tensor: Described) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def _enumerate(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
