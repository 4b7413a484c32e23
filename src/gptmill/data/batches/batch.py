"""Batches: token rows turned into inputs and targets, on the device that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.data.batches.row_reader import Rows


@dataclass(frozen=True)
class Batch:
    """Input tokens, and as targets the same tokens shifted by one position.

    `documents` holds for each token the position in its row where its document starts; with None, attention spans
    the whole row. `domains` holds the index of each row's corpus, for the per-domain loss; None with a single corpus.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    domains: Tensor | None = None


def make_batch(rows: Rows, ignored_target: int, separator: int | None = None, width: int | None = None) -> Batch:
    """Makes a batch without synchronising with the device.

    `separator` is the token that starts a document; if given, `documents` is filled in. `width` splits each row into
    rows of that length.
    """
    tokens, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    if rows.lengths is not None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        targets = targets.where(positions < rows.lengths[:, None], ignored_target)
    width = width or tokens.shape[1]
    domains = None if rows.corpora is None else rows.corpora.repeat_interleave(tokens.shape[1] // width)
    tokens, targets = tokens.reshape(-1, width).contiguous(), targets.reshape(-1, width).contiguous()
    return Batch(tokens, targets, None if separator is None else find_documents(tokens, separator), domains)


def find_documents(tokens: Tensor, separator: int) -> Tensor:
    """Returns the position in its row where each token's document starts; 0 if it started before the row."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return positions.where(tokens == separator, 0).cummax(dim=1).values
