"""Published tensors as pieces of ours: each is some rows of one, or, in GPT-2, one turned around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.config.errors import UserError


@dataclass(frozen=True)
class Piece:
    """A published tensor: so many rows of one of ours, of a stack's matrices one after the other."""

    name: str
    rows: int
    is_transposed: bool = False
    """Stored as (in, out), where nn.Linear has (out, in)."""


@dataclass(frozen=True)
class Source:
    """The pieces of one of our tensors in their order, and of how many matrices it is a stack."""

    pieces: tuple[Piece, ...]
    stacked: int | None = None


Pieces = Mapping[str, Source]


def cut(weights: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    """Our tensors cut into their pieces: views of ours wherever nothing is turned."""
    published: dict[str, Tensor] = {}
    for name, source in pieces.items():
        tensor = weights[name] if source.stacked is None else weights[name].flatten(0, 1)
        parts = tensor.split([piece.rows for piece in source.pieces])
        for piece, part in zip(source.pieces, parts, strict=True):
            published[piece.name] = part.t().contiguous() if piece.is_transposed else part
    return published


def join(published: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    """The inverse of `cut`; raises UserError where a piece is missing, or is none of the model that the config says."""
    wanted = [piece for source in pieces.values() for piece in source.pieces]
    if missing := [piece.name for piece in wanted if piece.name not in published]:
        raise UserError(f"the weights have no {_list_names(missing)}, which their config asks for; use the right pair")
    if unknown := published.keys() - {piece.name for piece in wanted}:
        raise UserError(f"the weights have {_list_names(unknown)}, unknown to their config; use the right pair")
    weights: dict[str, Tensor] = {}
    for name, source in pieces.items():
        parts = [_turn(published[piece.name], piece) for piece in source.pieces]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        weights[name] = tensor if source.stacked is None else tensor.unflatten(0, (source.stacked, -1))
    return weights


def _turn(tensor: Tensor, piece: Piece) -> Tensor:
    turned = tensor.t().contiguous() if piece.is_transposed else tensor
    if turned.shape[:1] != (piece.rows,):
        shape = " x ".join(str(size) for size in tensor.shape)
        raise UserError(
            f"the weights' {piece.name} is {shape}, and their config makes it {piece.rows}; use the right pair"
        )
    return turned


def _list_names(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
