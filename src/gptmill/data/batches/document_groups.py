"""Whole documents as rows: split where they exceed the context, and bucketed by length to limit the row shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptmill.data.batches.order import make_key, permute
from gptmill.data.shards.arrays import IndexArray

SMALLEST_WIDTH = 16
GROUPS_TAG, PIECES_TAG = 3, 4


@dataclass(frozen=True)
class Pieces:
    """Documents, and the parts of long ones: 20 bytes each. A piece has as many targets as tokens.

    A document is followed by end_of_text, as in the shards, so that every token is an input once and a target once.
    """

    shards: NDArray[np.int32]
    starts: IndexArray
    lengths: IndexArray


def cut_documents(sizes: IndexArray, starts: Sequence[IndexArray], longest: int) -> Pieces:
    """Splits all documents into pieces of at most `longest` tokens; `sizes` and `starts` are those of the shards."""
    parts: list[tuple[NDArray[np.int32], IndexArray, IndexArray]] = []
    for shard, (size, shard_starts) in enumerate(zip(sizes, starts, strict=True)):
        later = starts[shard + 1] if shard + 1 < len(starts) else np.zeros(1, dtype=np.int64)
        is_continued = not len(later) or later[0] != 0
        # The last token before a document continues in the next shard is a target only.
        end = size - 1 if is_continued else size
        bounds = np.concatenate([[0], shard_starts[(shard_starts > 0) & (shard_starts < end)], [end]]).astype(np.int64)
        lengths = np.diff(bounds)
        counts = -(-lengths // longest)
        offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        firsts, totals = np.repeat(bounds[:-1], counts), np.repeat(lengths, counts)
        parts.append((np.full(len(offsets), shard, np.int32), firsts + offsets, np.minimum(longest, totals - offsets)))
    shards, piece_starts, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Pieces(shards, piece_starts, lengths)


class DocumentGroups:
    """The micro-batches of an epoch, each of pieces padded to one width; every piece is in exactly one of them.

    A group has as many rows as fit into `max_tokens`. Uses 8 bytes per piece besides the pieces themselves.
    """

    def __init__(self, pieces: Pieces, longest: int, max_tokens: int, seed: int, corpus: int = 0) -> None:
        self.pieces = pieces
        self._seed, self._corpus = seed, corpus
        self._widths = np.array(list_widths(longest), dtype=np.int64)
        self._rows = max_tokens // self._widths
        buckets = np.searchsorted(self._widths, pieces.lengths).astype(np.uint8)
        self._members = np.argsort(buckets, kind="stable")
        self._counts = np.bincount(buckets, minlength=len(self._widths)).astype(np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._group_ends = np.cumsum(-(-self._counts // self._rows))
        self.num_groups = int(self._group_ends[-1])

    def find(self, number: int) -> tuple[IndexArray, int, int]:
        """Returns (pieces, width, rows) of a group; the last group of a width may have fewer pieces than rows."""
        epoch, position = divmod(number, self.num_groups)
        key = (self._seed, epoch, self._corpus)
        (group,) = permute(np.array([position], dtype=np.int64), self.num_groups, make_key(*key, GROUPS_TAG))
        bucket = int(np.searchsorted(self._group_ends, group, side="right"))
        rows, count = int(self._rows[bucket]), int(self._counts[bucket])
        index = int(group) - int(self._group_ends[bucket - 1] if bucket else 0)
        positions = np.arange(index * rows, min((index + 1) * rows, count), dtype=np.int64)
        order = permute(positions, count, make_key(*key, PIECES_TAG, bucket))
        return self._members[self._firsts[bucket] + order], int(self._widths[bucket]), rows


def list_widths(longest: int) -> list[int]:
    """Returns the row widths in ascending order: `longest`, halved as long as it stays above the minimum."""
    widths = [longest]
    while widths[0] // 2 >= SMALLEST_WIDTH:
        widths.insert(0, widths[0] // 2)
    return widths
