"""The buckets of the histograms of weights and gradients: exponential, and the same for every tensor and step.

Fixed buckets need no look at the data first, so that a device counts without a host synchronisation, and histograms of
different steps and runs can be compared bucket by bucket.
"""

from __future__ import annotations

MIN_EXPONENT, MAX_EXPONENT = -40, 8  # magnitudes below and above count in the innermost and the outermost buckets
PER_OCTAVE = 2
LEVELS = (MAX_EXPONENT - MIN_EXPONENT) * PER_OCTAVE
"""Buckets on each side of the one in the middle, which has what is (almost) zero."""
NUM_BUCKETS = 2 * LEVELS + 1


def _make_edges() -> list[float]:
    magnitudes = [2.0 ** (MIN_EXPONENT + level / PER_OCTAVE) for level in range(LEVELS + 1)]
    return [-magnitude for magnitude in reversed(magnitudes)] + magnitudes


EDGES = _make_edges()
"""Bucket i reaches from EDGES[i] to EDGES[i + 1]."""


def trim(counts: list[int]) -> tuple[list[int], list[float]]:
    """Returns the counts without the empty buckets at both ends, and their edges; nothing if all are empty."""
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return [], []
    first, last = filled[0], filled[-1]
    return counts[first : last + 1], EDGES[first : last + 2]
