"""Whole documents as rows: cut where they are too long, and grouped by length so that few shapes occur."""

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
    """Documents and parts of long ones: 20 bytes for each. A piece predicts as many tokens as it has.

    What follows a document is end_of_text, as in the shards, so that every token is an input once and a target once.
    """

    shards: NDArray[np.int32]
    starts: IndexArray
    lengths: IndexArray


def cut_documents(sizes: IndexArray, starts: Sequence[IndexArray], longest: int) -> Pieces:
    """All documents of shards of such sizes in pieces of at most `longest` tokens."""
    parts: list[tuple[NDArray[np.int32], IndexArray, IndexArray]] = []
    for shard, (size, own) in enumerate(zip(sizes, starts, strict=True)):
        later = starts[shard + 1] if shard + 1 < len(starts) else np.zeros(1, dtype=np.int64)
        goes_on = not len(later) or later[0] != 0
        # The last token of a document that goes on in the next shard is a target only.
        end = size - 1 if goes_on else size
        bounds = np.concatenate([[0], own[(own > 0) & (own < end)], [end]]).astype(np.int64)
        lengths = np.diff(bounds)
        counts = -(-lengths // longest)
        offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        first, whole = np.repeat(bounds[:-1], counts), np.repeat(lengths, counts)
        parts.append((np.full(len(offsets), shard, np.int32), first + offsets, np.minimum(longest, whole - offsets)))
    shards, firsts, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Pieces(shards, firsts, lengths)


class DocumentGroups:
    """The micro-batches of an epoch, each of pieces that round up to one width; every piece stands in one of them.

    Beside the pieces, 8 bytes for each are kept.
    """

    def __init__(self, pieces: Pieces, longest: int, budget: int, seed: int, corpus: int = 0) -> None:
        self.pieces = pieces
        self._seed, self._corpus = seed, corpus
        self._widths = np.array(list_widths(longest), dtype=np.int64)
        self._rows = budget // self._widths
        buckets = np.searchsorted(self._widths, pieces.lengths).astype(np.uint8)
        self._members = np.argsort(buckets, kind="stable")
        self._counts = np.bincount(buckets, minlength=len(self._widths)).astype(np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._group_ends = np.cumsum(-(-self._counts // self._rows))
        self.num_domains = int(self._group_ends[-1])

    def find(self, number: int) -> tuple[IndexArray, int, int]:
        """(pieces, width, rows) of a group by running number; the last group of a width may have fewer than `rows`."""
        epoch, place = divmod(number, self.num_domains)
        key = (self._seed, epoch, self._corpus)
        (group,) = permute(np.array([place], dtype=np.int64), self.num_domains, make_key(*key, GROUPS_TAG))
        bucket = int(np.searchsorted(self._group_ends, group, side="right"))
        rows, count = int(self._rows[bucket]), int(self._counts[bucket])
        turn = int(group) - int(self._group_ends[bucket - 1] if bucket else 0)
        places = np.arange(turn * rows, min((turn + 1) * rows, count), dtype=np.int64)
        order = permute(places, count, make_key(*key, PIECES_TAG, bucket))
        return self._members[self._firsts[bucket] + order], int(self._widths[bucket]), rows


def list_widths(longest: int) -> list[int]:
    """The widths of rows, from narrow to wide: halves of the longest."""
    widths = [longest]
    while widths[0] // 2 >= SMALLEST_WIDTH:
        widths.insert(0, widths[0] // 2)
    return widths
