"""Curriculum order: the first epoch follows the documents' scores, later epochs are shuffled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gptmill.data.batches.order import Shuffle, make_key, permute
from gptmill.data.shards.arrays import IndexArray
from gptmill.data.shards.opening import SplitWindows
from gptmill.data.shards.scores import ScoreArray

NUM_BANDS = 100
BANDS_TAG = 5


class Curriculum:
    """Windows sorted by score into bands of equal size, shuffled inside each band. Uses 8 bytes per window."""

    def __init__(self, window_scores: NDArray[np.float64], seed: int, corpus: int = 0) -> None:
        self._seed, self._corpus = seed, corpus
        self._by_score = np.argsort(window_scores, kind="stable")
        self._edges = np.arange(NUM_BANDS + 1, dtype=np.int64) * len(self._by_score) // NUM_BANDS
        self._shuffle = Shuffle(len(self._by_score), seed, corpus)

    def find(self, numbers: IndexArray) -> IndexArray:
        windows = self._shuffle.find(numbers)
        is_first = numbers < len(self._by_score)
        windows[is_first] = self._find_in_first_epoch(numbers[is_first])
        return windows

    def _find_in_first_epoch(self, positions: IndexArray) -> IndexArray:
        bands = np.searchsorted(self._edges, positions, side="right") - 1
        ranks = np.empty_like(positions)
        for band in np.unique(bands):
            chosen = bands == band
            first, end = int(self._edges[band]), int(self._edges[band + 1])
            key = make_key(self._seed, int(band), self._corpus, BANDS_TAG)
            ranks[chosen] = first + permute(positions[chosen] - first, end - first, key)
        return self._by_score[ranks]


def score_windows(windows: SplitWindows, starts: Sequence[IndexArray], scores: ScoreArray) -> NDArray[np.float64]:
    """Returns for each window the mean over its tokens of the scores of their documents."""
    parts: list[NDArray[np.float64]] = []
    num_before = 0  # documents that start in earlier shards
    for size, shard_starts, count in zip(windows.lengths, starts, windows.counts, strict=True):
        # Unless a document starts at position 0, the shard begins with the rest of an earlier one.
        is_continued = not len(shard_starts) or shard_starts[0] != 0
        bounds = np.concatenate([[0] if is_continued else [], shard_starts, [size]]).astype(np.int64)
        own_scores = scores[num_before - is_continued : num_before + len(shard_starts)].astype(np.float64)
        # The cumulative score is linear in the position between document bounds.
        sums = np.concatenate([[0.0], np.cumsum(own_scores * np.diff(bounds))])
        edges = np.arange(count + 1) * windows.context_length
        parts.append(np.diff(np.interp(edges, bounds, sums)) / windows.context_length)
        num_before += len(shard_starts)
    return np.concatenate(parts)
