"""Batches: rows of tokens made into what a model is trained on, on the device that they are on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.data.batches.row_reader import Rows


@dataclass(frozen=True)
class Batch:
    """Tokens and, one place on, the targets that they should predict.

    `documents` holds, for each token, the place in its row at which its document begins; None lets all of a row be
    seen as one text. `groups` holds the number of each row's corpus; None where all rows are of one.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    groups: Tensor | None = None


def make_batch(rows: Rows, ignored_target: int, separator: int | None = None, width: int | None = None) -> Batch:
    """Nothing here waits for the device. A `separator` is the token that opens documents, which are then kept apart;
    a `width` cuts each row into shorter ones."""
    tokens, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    if rows.lengths is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        targets = targets.where(places < rows.lengths[:, None], ignored_target)
    width = width or tokens.shape[1]
    groups = None if rows.corpora is None else rows.corpora.repeat_interleave(tokens.shape[1] // width)
    tokens, targets = tokens.reshape(-1, width).contiguous(), targets.reshape(-1, width).contiguous()
    return Batch(tokens, targets, None if separator is None else find_documents(tokens, separator), groups)


def find_documents(tokens: Tensor, separator: int) -> Tensor:
    """The place in its row at which each token's document begins: 0 for one that began before the row."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return places.where(tokens == separator, 0).cummax(dim=1).values
