"""The keys under which a document is known to the search for duplicates.

Near duplicates share one key of MinHash at least: 5-word phrases, 14 bands of 8 rows, as FineWeb does it (Penedo et al.
2024, arXiv:2406.17557). Two documents that have a share s of their phrases in common are found with probability
1 - (1 - s^8)^14: half of them at 0.71, 92 % at 0.8, 5 % at 0.5; no further comparison follows.
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
    """A function from hashed phrases to one key per band; it gives none for no phrases."""
    minhash = import_for("--drop_near_duplicates", "rensa").RMinHash

    def make_band_keys(phrases: Keys) -> list[int]:
        if not len(phrases):
            return []
        ends = np.array([0, len(phrases)], np.uint64)
        (rows,) = minhash.digest_matrix_from_flat_token_hashes(phrases, ends, BANDS * ROWS, SEED).to_rows()
        bands = np.array(rows, "<u4").reshape(BANDS, ROWS)
        return [hash_bytes(bytes([number]) + band.tobytes()) for number, band in enumerate(bands)]

    return make_band_keys


def describe_minhash() -> str:
    """What decides the keys beside the text; keys of different descriptions must not meet."""
    version = import_for("--drop_near_duplicates", "rensa").RMinHash.ALGORITHM_VERSION
    return f"rensa algorithm {version}, {BANDS} x {ROWS}, seed {SEED}"
