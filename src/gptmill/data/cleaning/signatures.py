"""MinHash LSH keys for near-duplicate detection.

Word 5-grams, 14 bands of 8 rows, as in FineWeb (Penedo et al. 2024, arXiv:2406.17557). Two documents of Jaccard
similarity s share a band key with probability 1 - (1 - s^8)^14: 50 % at s = 0.71, 92 % at 0.8, 5 % at 0.5. A shared key
counts as a duplicate without further comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gptmill.data.cleaning.extras import import_for
from gptmill.data.cleaning.words import hash_bytes

Keys = NDArray[np.uint64]
BANDS = 14
ROWS = 8
SEED = 1


def load_minhash() -> Callable[[Keys], list[int]]:
    """Returns a function from hashed n-grams to one key per band; no n-grams give no keys."""
    minhash = import_for("--drop_near_duplicates", "rensa").RMinHash

    def make_band_keys(ngrams: Keys) -> list[int]:
        if not len(ngrams):
            return []
        offsets = np.array([0, len(ngrams)], np.uint64)
        (rows,) = minhash.digest_matrix_from_flat_token_hashes(ngrams, offsets, BANDS * ROWS, SEED).to_rows()
        bands = np.array(rows, "<u4").reshape(BANDS, ROWS)
        return [hash_bytes(bytes([number]) + band.tobytes()) for number, band in enumerate(bands)]

    return make_band_keys


def describe_minhash() -> str:
    """Describes the parameters that the keys depend on; keys of different parameters must not be mixed."""
    version = import_for("--drop_near_duplicates", "rensa").RMinHash.ALGORITHM_VERSION
    return f"rensa algorithm {version}, {BANDS} x {ROWS}, seed {SEED}"
