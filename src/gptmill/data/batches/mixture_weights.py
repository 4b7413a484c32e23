"""Mixing several corpora by weight: exact proportions, as a pure function of the sample number.

Sample j of a corpus of weight w has the ideal time (2j + 1) / (2w), and all samples are read in the order of their
times (the Webster/Sainte-Laguë method of apportioning seats). After any number of samples, each of m corpora is
within (1 + (m - 2) p) / 2 samples of its share p; with two corpora, within half a sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gptmill.data.shards.arrays import IndexArray


class MixtureWeights:
    """The merged sequence of samples. Integer arithmetic only, so that nothing drifts however long the run."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        integers = [int(weight * scale) for weight in weights]
        self.weights = tuple(weight // math.gcd(*integers) for weight in integers)
        self._total = sum(self.weights)
        period = math.lcm(*self.weights)
        self._strides = [period // weight for weight in self.weights]

    def count(self, total: int) -> list[int]:
        """Resamples how many of the first `total` samples each corpus has, in time independent of `total`."""
        if len(self.weights) == 1:
            return [total]
        # Count all samples up to a time that cannot overshoot; fewer than one per corpus are then missing.
        early = 2 * total - len(self.weights)
        counts = [max(0, (early * weight + self._total) // (2 * self._total)) for weight in self.weights]
        self._advance(counts, total - sum(counts))
        return counts

    def assign(self, start: int, size: int) -> tuple[IndexArray, IndexArray]:
        """Resamples the corpus, and the number within that corpus, of samples start … start + size - 1."""
        if len(self.weights) == 1:
            return np.zeros(size, dtype=np.int64), np.arange(start, start + size, dtype=np.int64)
        counts = self.count(start)
        samples = self._advance(counts, size)
        return np.array([corpus for corpus, _ in samples]), np.array([number for _, number in samples])

    def _advance(self, counts: list[int], size: int) -> list[tuple[int, int]]:
        """Resamples the next samples as (corpus, number), ordered by time and then by corpus; updates `counts`."""
        times = [
            ((2 * count + 1) * stride, corpus)
            for corpus, (count, stride) in enumerate(zip(counts, self._strides, strict=True))
        ]
        heapq.heapify(times)
        samples: list[tuple[int, int]] = []
        for _ in range(size):
            time, corpus = times[0]
            samples.append((corpus, counts[corpus]))
            counts[corpus] += 1
            heapq.heapreplace(times, (time + 2 * self._strides[corpus], corpus))
        return samples
