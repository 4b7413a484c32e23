"""Window offsets: shifts the window boundaries every epoch, so that repeated epochs see different windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptmill.data.batches.order import make_key, permute
from gptmill.data.shards.arrays import IndexArray
from gptmill.data.shards.opening import SplitWindows

OFFSET_TAG = 3  # separates keys of the same seed and epoch


@dataclass(frozen=True)
class WindowOffset:
    """The offset of a corpus's windows: a pure function of the epoch, 0 in the first one."""

    windows: SplitWindows
    seed: int
    corpus: int = 0

    def apply(self, shards: IndexArray, starts: IndexArray, numbers: IndexArray) -> IndexArray:
        """Returns the shifted starts of windows, given their sample numbers; none runs past the end of its shard."""
        epochs, indices = np.unique(numbers // self.windows.num_windows, return_inverse=True)
        offsets = np.array([self._find_offset(int(epoch)) for epoch in epochs], dtype=np.int64)
        last_starts = self.windows.lengths[shards] - 1 - self.windows.context_length
        shifted: IndexArray = np.minimum(starts + offsets[indices], last_starts)
        return shifted

    def _find_offset(self, epoch: int) -> int:
        """Returns an offset of less than a window."""
        if epoch == 0:
            return 0
        key = make_key(self.seed, epoch, self.corpus, OFFSET_TAG)
        return int(permute(np.zeros(1, dtype=np.int64), self.windows.context_length, key)[0])
