"""Where windows are cut: every epoch elsewhere, so that what is read many times is not read in the same pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptmill.data.batches.order import make_key, permute
from gptmill.data.shards.arrays import IndexArray
from gptmill.data.shards.opening import SplitWindows

SHIFT_TAG = 3  # tells keys of the same seed and epoch apart


@dataclass(frozen=True)
class WindowOffset:
    """How far the windows of a corpus are moved: a pure function of the epoch. Those of the first stay."""

    windows: SplitWindows
    seed: int
    corpus: int = 0

    def move(self, shards: IndexArray, starts: IndexArray, numbers: IndexArray) -> IndexArray:
        """The starts of windows by their running numbers. The last of a shard moves only as far as there are tokens."""
        epochs, places = np.unique(numbers // self.windows.num_windows, return_inverse=True)
        distances = np.array([self._find_distance(int(epoch)) for epoch in epochs], dtype=np.int64)
        lasts = self.windows.lengths[shards] - 1 - self.windows.context_length
        moved: IndexArray = np.minimum(starts + distances[places], lasts)
        return moved

    def _find_distance(self, epoch: int) -> int:
        """Less than a window."""
        if epoch == 0:
            return 0
        key = make_key(self.seed, epoch, self.corpus, SHIFT_TAG)
        return int(permute(np.zeros(1, dtype=np.int64), self.windows.context_length, key)[0])
