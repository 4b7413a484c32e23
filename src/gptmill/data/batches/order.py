"""The order of windows: a keyed permutation in O(1) memory and time per window, so that the order has no state.

A balanced Feistel network over the smallest even number of bits that holds all windows; values past the end are
permuted again ("cycle walking") until they fall inside. A handful of windows has too few bits for its rounds to mix
well, and is sorted by random numbers instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gptmill.data.shards.arrays import IndexArray

ROUNDS = 4
MAX_SORTED = 64  # of more, not even pairs of positions show the network's bias over 20,000 keys
SHARDS_TAG = 2  # separates keys of the same seed and epoch


class Order(Protocol):
    """Maps the sample numbers of a corpus to its windows: a pure function."""

    def find(self, numbers: IndexArray) -> IndexArray: ...


@dataclass(frozen=True)
class Shuffle:
    """All windows, in a new order each epoch: number k is position k % num_windows of epoch k // num_windows."""

    num_windows: int
    seed: int
    corpus: int = 0

    def find(self, numbers: IndexArray) -> IndexArray:
        epochs, positions = np.divmod(numbers, self.num_windows)
        windows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(positions[chosen], self.num_windows, make_key(self.seed, int(epoch), self.corpus))
        return windows


@dataclass(frozen=True)
class ShardOrder:
    """Windows as stored, shard after shard; with a seed, the shards are shuffled each epoch."""

    counts: IndexArray
    seed: int | None = None
    corpus: int = 0

    def find(self, numbers: IndexArray) -> IndexArray:
        epochs, positions = np.divmod(numbers, self.counts.sum())
        firsts = np.cumsum(self.counts) - self.counts
        windows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            shards = self.list_shards(int(epoch))
            ends = np.cumsum(self.counts[shards])
            ranks = np.searchsorted(ends, positions[chosen], side="right")
            windows[chosen] = positions[chosen] - (ends - self.counts[shards])[ranks] + firsts[shards[ranks]]
        return windows

    def list_shards(self, epoch: int) -> IndexArray:
        """Returns the order of the shards in an epoch."""
        shards = np.arange(len(self.counts), dtype=np.int64)
        if self.seed is None:
            return shards
        return permute(shards, len(shards), make_key(self.seed, epoch, self.corpus, SHARDS_TAG))

    def list_next_shards(self, number: int, count: int) -> list[int]:
        """Returns the next `count` shards to be read from a sample number on, the current one first."""
        epoch, position = divmod(number, int(self.counts.sum()))
        shards = self.list_shards(epoch)
        rank = int(np.searchsorted(np.cumsum(self.counts[shards]), position, side="right"))
        following = np.concatenate([shards[rank:], self.list_shards(epoch + 1)])
        return [int(shard) for shard in following if self.counts[shard]][:count]


def make_key(seed: int, epoch: int, corpus: int, *tags: int) -> tuple[int, ...]:
    """Returns the key of a permutation of a corpus; the first corpus has the same key as in a run without others."""
    return (seed, epoch, corpus, *tags) if corpus or tags else (seed, epoch)


def permute(positions: IndexArray, size: int, key: tuple[int, ...]) -> IndexArray:
    """Maps each position in range(size) by the permutation with this key."""
    if size <= MAX_SORTED:
        return _sort_randomly(size, key)[positions]
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _make_round_keys(key)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


@lru_cache(maxsize=1024)
def _sort_randomly(size: int, key: tuple[int, ...]) -> IndexArray:
    """A uniformly distributed permutation, by numbers that every version of numpy draws alike."""
    return np.argsort(np.random.SeedSequence(key).generate_state(size, np.uint64), kind="stable").astype(np.int64)


@lru_cache(maxsize=1024)
def _make_round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    return np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
