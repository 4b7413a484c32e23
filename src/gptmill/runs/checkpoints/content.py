"""A checkpoint in memory. Knows no file formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.tiling import Box, Extent

MAX_LISTED = 3  # of the names with the same problem


@dataclass(frozen=True)
class Part:
    """A rectangular part of a local tensor, and its place in the global one."""

    start: Extent
    """In the local tensor."""
    box: Box
    """In the global tensor."""

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the part in the local tensor."""
        return Box(self.start, self.box.shape).index


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank holds of a global tensor: a piece, which may be empty or all of it, or several parts."""

    tensor: Tensor
    """The local tensor."""
    shape: Extent
    """Of the global tensor."""
    offset: Extent
    """Of the local tensor's first element in the global one."""
    is_written: bool = True
    """Whether this rank saves it; False where another rank has the same and saves that."""
    parts: tuple[Part, ...] = ()
    """Where the parts of the local tensor lie, if not side by side: a share of the queries, of the keys, ..."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Of the local tensor."""
        return int(self.tensor.nbytes)

    def list_parts(self) -> tuple[Part, ...]:
        local = tuple(self.tensor.shape)
        return self.parts or (Part((0,) * len(local), Box(self.offset, local)),)


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
