"""From easy to hard: the first epoch follows the documents' scores, later ones are shuffled."""

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
    """Windows by score in bands of equal size, shuffled inside each. Its table has 8 bytes for each window."""

    def __init__(self, window_scores: NDArray[np.float64], seed: int, corpus: int = 0) -> None:
        self._seed, self._corpus = seed, corpus
        self._by_score = np.argsort(window_scores, kind="stable")
        self._edges = np.arange(NUM_BANDS + 1, dtype=np.int64) * len(self._by_score) // NUM_BANDS
        self._later = Shuffle(len(self._by_score), seed, corpus)

    def find(self, numbers: IndexArray) -> IndexArray:
        windows = self._later.find(numbers)
        is_first = numbers < len(self._by_score)
        windows[is_first] = self._find_first(numbers[is_first])
        return windows

    def _find_first(self, places: IndexArray) -> IndexArray:
        bands = np.searchsorted(self._edges, places, side="right") - 1
        ranks = np.empty_like(places)
        for band in np.unique(bands):
            chosen = bands == band
            first, end = int(self._edges[band]), int(self._edges[band + 1])
            key = make_key(self._seed, int(band), self._corpus, BANDS_TAG)
            ranks[chosen] = first + permute(places[chosen] - first, end - first, key)
        return self._by_score[ranks]


def score_windows(windows: SplitWindows, starts: Sequence[IndexArray], scores: ScoreArray) -> NDArray[np.float64]:
    """The mean over each window's tokens of the scores of the documents that they stand in."""
    parts: list[NDArray[np.float64]] = []
    opened = 0  # documents that began in shards before
    for size, own, count in zip(windows.lengths, starts, windows.counts, strict=True):
        # Where no document starts at once, one goes on from the shard before.
        goes_on = not len(own) or own[0] != 0
        bounds = np.concatenate([[0] if goes_on else [], own, [size]]).astype(np.int64)
        here = scores[opened - goes_on : opened + len(own)].astype(np.float64)
        # The sum of scores up to any place is linear between bounds.
        sums = np.concatenate([[0.0], np.cumsum(here * np.diff(bounds))])
        edges = np.arange(count + 1) * windows.context_length
        parts.append(np.diff(np.interp(edges, bounds, sums)) / windows.context_length)
        opened += len(own)
    return np.concatenate(parts)
