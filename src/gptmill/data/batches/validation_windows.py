"""The fixed validation windows of a run: divided among corpora by weight, spread evenly over each corpus.

A corpus may have none: its validation split is empty, or shorter than a window.
"""

from __future__ import annotations

import numpy as np

from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.row_reader import HostReader, RowLocations, Rows
from gptmill.data.run_corpora import Corpora


class ValWindows:
    """`num_chosen` windows in a fixed order: at most `wanted`, and no more than the mixture weights allow.

    At least one corpus must have some.
    """

    def __init__(self, corpora: Corpora, context_length: int, wanted: int) -> None:
        self._windows = [shards.cut(shards.val, context_length) for shards in corpora.shards]
        self._members = np.array([corpus for corpus, windows in enumerate(self._windows) if windows.num_windows])
        self._mixture = MixtureWeights([corpora.weights[corpus] for corpus in self._members])
        tokenizer = corpora.tokenizer
        self._reader = HostReader(
            [shards.val for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size
        )
        self.context_length = context_length
        self.num_chosen = self._find_max(wanted)
        counts = dict(zip(self._members.tolist(), self._mixture.count(self.num_chosen), strict=True))
        self.counts = [counts.get(corpus, 0) for corpus in range(len(self._windows))]
        """Windows from each corpus."""

    def read(self, start: int, size: int) -> Rows:
        """Reads windows start … start + size - 1; those past the end get length 0, so that shapes never vary."""
        members, numbers = self._mixture.assign(start, size)
        beyond = np.arange(start, start + size) >= self.num_chosen
        members[beyond] = numbers[beyond] = 0
        corpora = self._members[members]
        shards, starts = np.zeros_like(numbers), np.zeros_like(numbers)
        for corpus, windows in enumerate(self._windows):
            mask = (corpora == corpus) & ~beyond
            spread = numbers[mask] * windows.num_windows // max(1, self.counts[corpus])
            shards[mask], starts[mask] = windows.locate(spread)
        lengths = np.where(beyond, 0, self.context_length).astype(np.int64)
        return self._reader.read(RowLocations(corpora, shards, starts, self.context_length, lengths))

    def _find_max(self, wanted: int) -> int:
        """Returns by bisection the largest number of windows of which every corpus can supply its share."""
        available = [self._windows[corpus].num_windows for corpus in self._members]
        low, high = 1, wanted
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(count <= held for count, held in zip(self._mixture.count(middle), available, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def find_unvalidated(corpora: Corpora, context_length: int) -> dict[str, int]:
    """The corpora without a validation window, each with the tokens of its longest validation shard."""
    cuts = {shards.location: shards.cut(shards.val, context_length) for shards in corpora.shards}
    return {name: int(cut.lengths.max(initial=0)) for name, cut in cuts.items() if not cut.num_windows}
