"""Tensors in the files of a checkpoint: described at once, read on demand, whole or in slices, from many ranks' shards.

Readers do not trust the files: every shape is checked before memory is allocated for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.json_text import check_values, parse_json
from gptmill.runs.checkpoints.tensor_files import DTYPES, METADATA, SHARDS, read_header
from gptmill.runs.checkpoints.tiling import Box, Extent, cover, find_tiling_error

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
MAX_LENGTH = 2**63 - 1
MAX_DIMENSIONS = 64
MAX_PLACEMENT_VALUES = 2**20  # in a header: a part of a shard takes ten
READ_ERRORS = (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a file, and its place in the global tensor of that name."""

    path: Path
    stored: Box
    """In the tensor of the file."""
    box: Box
    """In the global tensor."""
    shape: Extent
    """Of the global tensor."""
    dtype: torch.dtype

    def locate(self, part: Box) -> tuple[slice, ...]:
        """The index in the tensor of the file of what is a part of the global one."""
        inner = zip(part.locate_in(self.box), self.stored.offset, strict=True)
        return tuple(slice(begin + index.start, begin + index.stop) for index, begin in inner)


class OpenFiles:
    """Files that stay open and mapped while tensors are read from them."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def read(self, path: Path, name: str, index: tuple[slice, ...]) -> Tensor:
        """Reads a slice of a tensor; raises UserError unless the file is a valid safetensors file."""
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            stored = self._files[path].get_slice(name)
            # A scalar has no dimension to be sliced in.
            return stored[index] if index else self._files[path].get_tensor(name)  # type: ignore[no-any-return]
        except READ_ERRORS as error:
            raise UserError(
                f"checkpoint {path.parent} is damaged: {path.name} is not a valid safetensors file ({error!s:.200})"
            ) from None


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor of a checkpoint, in one piece or several."""

    name: str
    shape: Extent
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    files: OpenFiles = field(repr=False)

    def numel(self) -> int:
        return prod(self.shape)

    def read(self) -> Tensor:
        """Reads the whole tensor to the CPU."""
        return self.read_slice(cover(self.shape))

    def read_slice(self, wanted: Box) -> Tensor:
        """Reads a part of the tensor to the CPU, from the pieces that hold it, and nothing else."""
        parts = [(piece, part) for piece in self.pieces if (part := piece.box.intersect(wanted)) is not None]
        if len(parts) == 1 and parts[0][1] == wanted:
            return self._read_part(*parts[0])
        found = torch.empty(wanted.shape, dtype=self.dtype)
        for piece, part in parts:
            found[part.locate_in(wanted)] = self._read_part(piece, part)
        return found

    def _read_part(self, piece: Piece, part: Box) -> Tensor:
        return self.files.read(piece.path, self.name, piece.locate(part))


def open_tensors(paths: Iterable[Path]) -> dict[str, SavedTensor]:
    """Describes the tensors of a group from the headers of its files, without reading or verifying them.

    Raises UserError unless the shards of every tensor make up the whole, without gaps or overlaps.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for path in paths:
        for name, found in _list_pieces(path):
            pieces[name] += found
    files = OpenFiles()
    return {name: _join(name, found, files) for name, found in sorted(pieces.items())}


def _join(name: str, pieces: list[Piece], files: OpenFiles) -> SavedTensor:
    first, folder = pieces[0], pieces[0].path.parent
    if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in pieces):
        raise UserError(f"checkpoint {folder} is damaged: the shards of {name!r:.100} differ in dtype or global shape")
    if error := find_tiling_error(first.shape, [piece.box for piece in pieces]):
        raise UserError(f"checkpoint {folder} is damaged: {name!r:.100}: {error}")
    return SavedTensor(name, first.shape, first.dtype, tuple(pieces), files)


def _list_pieces(path: Path) -> list[tuple[str, list[Piece]]]:
    header = read_header(path)
    try:
        placements = parse_json(header.pop(METADATA, {}).get(SHARDS, "{}"))
        check_values(placements, MAX_PLACEMENT_VALUES)
        if unknown := placements.keys() - header.keys():
            raise ValueError(f"it places {min(unknown)!r:.100}, which it does not hold")
        return [(name, _make_pieces(path, entry, placements.get(name))) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint {path.parent} is damaged: the header of {path.name}: {error!s:.200}") from None


def _make_pieces(path: Path, entry: Any, placement: Any) -> list[Piece]:
    """Raises ValueError, KeyError or TypeError for an invalid entry."""
    local, dtype = _check_extent(entry["shape"]), TORCH_DTYPES[entry["dtype"]]
    if placement is None:
        return [Piece(path, cover(local), cover(local), local, dtype)]
    shape, pieces = _check_extent(placement[0]), []
    for start, offset, lengths in placement[1]:
        stored, box = (Box(_check_extent(begin), _check_extent(lengths)) for begin in (start, offset))
        if not len(shape) == len(local) == len(stored.offset) == len(stored.shape) == len(box.offset):
            raise ValueError("a shard has an offset or shape of another dimension")
        pieces.append(Piece(path, stored, box, shape, dtype))
    if error := find_tiling_error(local, [piece.stored for piece in pieces]):
        raise ValueError(f"the parts of a shard do not make it up: {error}")
    return pieces


def _check_extent(values: Any) -> Extent:
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        raise ValueError("a shape or offset is not a list of lengths")
    if any(type(value) is not int or not 0 <= value <= MAX_LENGTH for value in values):
        raise ValueError("a shape or offset is not a list of lengths")
    return tuple(values)
