"""Windows as training reads them."""

from __future__ import annotations

import numpy as np

from gptmill.data.batches.row_reader import HostReader, RowLocations
from gptmill.data.shards.arrays import IndexArray
from gptmill.data.shards.opening import SplitWindows


def read_windows(windows: SplitWindows, numbers: IndexArray, vocab_size: int = 1 << 16) -> IndexArray:
    """The tokens of windows, context_length + 1 of each."""
    shards, starts = windows.locate(numbers)
    locations = RowLocations(np.zeros_like(numbers), shards, starts, windows.context_length)
    rows: IndexArray = HostReader([windows.arrays], 0, vocab_size).read(locations).tokens.numpy()
    return rows
