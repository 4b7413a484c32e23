"""The buckets of the histograms of weights and gradients: exponential, and the same for every tensor and step.

Fixed buckets need no look at the data first, so that a device counts without a host synchronisation, and histograms of
different steps and runs can be compared bucket by bucket.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_EXPONENT, MAX_EXPONENT = -40, 8  # magnitudes below and above count in the innermost and the outermost buckets
PER_OCTAVE = 2
LEVELS = (MAX_EXPONENT - MIN_EXPONENT) * PER_OCTAVE
"""Buckets on each side of the one in the middle, which has what is (almost) zero."""
NUM_BUCKETS = 2 * LEVELS + 1


Counts = NDArray[np.int64]
Edges = NDArray[np.float64]


def _make_edges() -> Edges:
    magnitudes = [2.0 ** (MIN_EXPONENT + level / PER_OCTAVE) for level in range(LEVELS + 1)]
    return np.array([-magnitude for magnitude in reversed(magnitudes)] + magnitudes)


EDGES = _make_edges()
"""Bucket i reaches from EDGES[i] to EDGES[i + 1]."""


def trim(rows: Counts) -> list[tuple[Counts, Edges]]:
    """Returns the counts of each row without the empty buckets at both ends, and their edges; nothing if all are empty.

    All rows at once, since a model has hundreds, and the time that Python takes for them is taken from training.
    """
    filled = rows != 0
    first = filled.argmax(axis=1)
    end = np.where(filled.any(axis=1), NUM_BUCKETS - filled[:, ::-1].argmax(axis=1), first)
    return [
        (row[start:stop], EDGES[start : stop + 1] if stop > start else EDGES[:0])
        for row, start, stop in zip(rows, first.tolist(), end.tolist(), strict=True)
    ]
