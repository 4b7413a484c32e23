"""Iterates over the documents of a split, from any document on, reading one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gptmill.data.shards.arrays import IndexArray
from gptmill.data.tokenizers.protocol import TokenArray


def read_document_tokens(
    shards: Sequence[TokenArray], starts: Sequence[IndexArray], first: int = 0
) -> Iterator[TokenArray]:
    """Yields the tokens of each document from number `first` on, each with the end_of_text that it begins with.

    A document may continue in the next shard.
    """
    pieces: list[TokenArray] = []
    skipped = first
    for tokens, positions in zip(shards, starts, strict=True):
        if not pieces and skipped >= len(positions):
            skipped -= len(positions)
            continue
        cuts = positions[skipped:]
        begin = 0 if pieces else int(cuts[0])
        for cut in cuts if pieces else cuts[1:]:
            yield np.concatenate([*pieces, tokens[begin:cut]]) if pieces else tokens[begin:cut]
            pieces, begin = [], int(cut)
        pieces.append(tokens[begin:])
        skipped = 0
    if pieces:
        yield np.concatenate(pieces)
