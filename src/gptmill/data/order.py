"""The order of windows: a keyed permutation in O(1) memory and time per window, so that order has no state.

A balanced Feistel network over the smallest even number of bits that holds all windows; values that land past
the end are sent through again ("cycle walking") until they fall inside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 4
IndexArray = NDArray[np.int64]


def make_window_order(numbers: IndexArray, num_windows: int, seed: int) -> IndexArray:
    """The window behind each running number: number k is place k % num_windows of epoch k // num_windows."""
    epochs, places = np.divmod(numbers, num_windows)
    windows = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        windows[chosen] = permute(places[chosen], num_windows, (seed, int(epoch)))
    return windows


def permute(places: IndexArray, size: int, key: tuple[int, ...]) -> IndexArray:
    """Where each place in range(size) goes under the permutation that `key` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys: NDArray[np.uint64] = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
