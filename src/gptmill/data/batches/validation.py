"""The fixed windows on which a run is validated: shared out by weight, spread evenly over each corpus."""

from __future__ import annotations

import numpy as np

from gptmill.data.batches.row_reader import HostReader, RowLocations, Rows
from gptmill.data.run_corpora import Corpora


class ValWindows:
    """`num_chosen` windows in a fixed order, at most as many as were asked for and as the shares allow."""

    def __init__(self, corpora: Corpora, context_length: int, wanted: int) -> None:
        self._shares = corpora.mixture
        self._windows = [shards.cut(shards.val, context_length) for shards in corpora.shards]
        tokenizer = corpora.tokenizer
        self._reader = HostReader(
            [shards.val for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size
        )
        self.context_length = context_length
        self.num_chosen = self._find_most(wanted)
        self.counts = self._shares.count(self.num_chosen)
        """How many of them are of each corpus."""

    def read(self, start: int, size: int) -> Rows:
        """Numbers start … start + size - 1; those past the end have length 0, so that every batch has one shape."""
        corpora, numbers = self._shares.assign(start, size)
        beyond = np.arange(start, start + size) >= self.num_chosen
        corpora[beyond] = numbers[beyond] = 0
        shards, starts = np.zeros_like(numbers), np.zeros_like(numbers)
        for corpus, windows in enumerate(self._windows):
            own = (corpora == corpus) & ~beyond
            spread = numbers[own] * windows.num_windows // max(1, self.counts[corpus])
            shards[own], starts[own] = windows.locate(spread)
        lengths = np.where(beyond, 0, self.context_length).astype(np.int64)
        return self._reader.read(RowLocations(corpora, shards, starts, self.context_length, lengths))

    def _find_most(self, wanted: int) -> int:
        """The most windows of which no corpus lacks its share: counts only grow, so that halving finds it."""
        available = [windows.num_windows for windows in self._windows]
        least, most = 1, wanted
        while least < most:
            middle = (least + most + 1) // 2
            fits = all(count <= held for count, held in zip(self._shares.count(middle), available, strict=True))
            least, most = (middle, most) if fits else (least, middle - 1)
        return least
