"""Encoded requests as rows of tokens. Requests with the same context share one row: the model reads it once, and each
continuation is a branch behind it, which sees the context and itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.evals.request_encoding import Sequences

MIN_SHARED = 8  # tokens of a context: fewer are not worth a mask

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenRows:
    """Rows one behind the other, and their scored tokens in the order of the requests."""

    ids: Ints
    positions: Ints
    """Of each token, in the text that it belongs to."""
    branches: Ints
    """Of each token: 1 for the context, and from 2 on the continuations of its row."""
    lengths: Ints
    """Of the rows."""
    scored: Ints
    """Scored tokens of each row."""
    columns: Ints
    """Of each scored token: the column of its row that predicts it."""
    targets: Ints
    """The scored tokens themselves."""
    has_branches: bool
    """Whether a row has several continuations."""


def lay_out_rows(sequences: Sequences, max_length: int, *, shares_contexts: bool) -> TokenRows:
    """The last token of a continuation predicts nothing, and is left out. No row is longer than `max_length`."""
    counts = sequences.scored
    sizes = np.fromiter(map(len, sequences.ids), dtype=np.int64, count=len(sequences.ids)) - counts  # of the contexts
    firsts = list(_list_first_requests(sequences, sizes, max_length)) if shares_contexts else [*range(len(counts))]
    parts: list[NDArray[np.integer[Any]]] = []
    part_branches: list[int] = []
    for first, end in pairwise([*firsts, len(counts)]):
        size = sizes[first]
        parts += [sequences.ids[first][:size], *(sequences.ids[number][size:-1] for number in range(first, end))]
        part_branches += range(end - first + 1)
    part_sizes = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    is_context = np.array(part_branches) == 0
    members = np.diff([*firsts, len(counts)])
    part_starts = _start(part_sizes)
    row_starts = part_starts[is_context]
    # Where each continuation begins: in the text, and in its row.
    first_positions = np.zeros_like(part_sizes)
    first_positions[~is_context] = sizes
    offsets = part_starts[~is_context] - np.repeat(row_starts, members)
    numbers = np.arange(counts.sum()) - np.repeat(_start(counts), counts)
    columns = np.where(numbers == 0, np.repeat(sizes, counts), np.repeat(offsets, counts) + numbers) - 1
    return TokenRows(
        np.concatenate(parts).astype(np.int64, copy=False),
        np.arange(part_sizes.sum()) + np.repeat(first_positions - part_starts, part_sizes),
        np.repeat(np.array(part_branches) + 1, part_sizes),
        np.add.reduceat(part_sizes, np.flatnonzero(is_context)),
        np.add.reduceat(counts, firsts),
        columns,
        np.concatenate([ids[-count:] for ids, count in zip(sequences.ids, counts, strict=True)]).astype(np.int64),
        bool((members > 1).any()),
    )


def _list_first_requests(sequences: Sequences, sizes: Ints, max_length: int) -> Iterator[int]:
    """The first request of every row."""
    length, context = max_length + 1, np.array([], dtype=np.int64)
    for number, (ids, size, count) in enumerate(zip(sequences.ids, sizes, sequences.scored, strict=True)):
        length += count - 1
        is_long = length > max_length or size < MIN_SHARED
        if is_long or not np.array_equal(ids[:size], context):
            length, context = size + count - 1, ids[:size]
            yield number


def _start(sizes: Ints) -> Ints:
    """Where each of several parts begins that lie one behind the other."""
    return np.cumsum(sizes) - sizes
