"""Whose turn it is among several corpora: exact shares, as a pure function of the running number.

The j-th unit of a corpus of weight w stands at the ideal time (2j + 1) / (2w), and all units are read in the order
of their times (Webster and Sainte-Laguë share out seats so). After any number of units, each of m corpora is within
(1 + (m - 2) p) / 2 units of its share p of them; of two corpora, within half a unit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gptmill.data.shards.arrays import IndexArray


class MixtureWeights:
    """The merged sequence of units. Whole numbers only, so that nothing drifts in a run of any length."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * scale) for weight in weights]
        self.weights = tuple(weight // math.gcd(*whole) for weight in whole)
        self._total = sum(self.weights)
        period = math.lcm(*self.weights)
        self._strides = [period // weight for weight in self.weights]

    def count(self, total: int) -> list[int]:
        """How many of the first `total` units are of each corpus; takes as long for any total."""
        if len(self.weights) == 1:
            return [total]
        # All units up to a time at which they are surely not too many; fewer than one for each corpus are missing.
        early = 2 * total - len(self.weights)
        counts = [max(0, (early * weight + self._total) // (2 * self._total)) for weight in self.weights]
        self._take(counts, total - sum(counts))
        return counts

    def assign(self, start: int, size: int) -> tuple[IndexArray, IndexArray]:
        """(corpus, number inside that corpus) of units start … start + size - 1."""
        if len(self.weights) == 1:
            return np.zeros(size, dtype=np.int64), np.arange(start, start + size, dtype=np.int64)
        counts = self.count(start)
        turns = self._take(counts, size)
        return np.array([corpus for corpus, _ in turns]), np.array([number for _, number in turns])

    def _take(self, counts: list[int], size: int) -> list[tuple[int, int]]:
        """The next units, each as (corpus, number), by time and then by corpus; counts them in `counts`."""
        times = [
            ((2 * taken + 1) * stride, corpus)
            for corpus, (taken, stride) in enumerate(zip(counts, self._strides, strict=True))
        ]
        heapq.heapify(times)
        turns: list[tuple[int, int]] = []
        for _ in range(size):
            time, corpus = times[0]
            turns.append((corpus, counts[corpus]))
            counts[corpus] += 1
            heapq.heapreplace(times, (time + 2 * self._strides[corpus], corpus))
        return turns
