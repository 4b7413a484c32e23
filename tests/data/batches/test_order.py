"""The order of windows: a permutation per epoch, a pure function of its key, without a table."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.data.batches.order import Order, ShardOrder, Shuffle, permute

KEYS = st.lists(st.integers(0, 2**70), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**64)


def count_up(start: int, size: int) -> np.ndarray:
    return np.arange(start, start + size, dtype=np.int64)


@given(size=st.integers(1, 5000), key=KEYS)
@settings(deadline=None)
def test_permute_hits_every_position_once(size: int, key: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(np.sort(permute(count_up(0, size), size, key)), count_up(0, size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4**8, 4**8 + 1])
def test_permute_hits_every_position_once_around_powers_of_two(size: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(count_up(0, size), size, (7, 3))), count_up(0, size))


@given(size=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 1000), count=st.integers(1, 4))
@settings(deadline=None)
def test_every_epoch_holds_every_window_once(size: int, seed: int, epoch: int, count: int) -> None:
    windows = Shuffle(size, seed).find(count_up(epoch * size, count * size))
    for index in range(count):
        np.testing.assert_array_equal(np.sort(windows[index * size : (index + 1) * size]), count_up(0, size))


@pytest.mark.slow
@given(size=st.integers(1, 50), seed=SEEDS, start=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 120), max_size=5))
@settings(deadline=None, max_examples=30)
def test_the_order_is_the_same_however_it_is_asked_for(size: int, seed: int, start: int, cuts: list[int]) -> None:
    numbers = count_up(start, 120)
    whole = Shuffle(size, seed).find(numbers)
    parts = np.split(numbers, sorted(cuts))
    np.testing.assert_array_equal(np.concatenate([Shuffle(size, seed).find(part) for part in parts]), whole)
    one_by_one = [int(Shuffle(size, seed).find(number[None])[0]) for number in numbers]
    np.testing.assert_array_equal(one_by_one, whole)
    np.testing.assert_array_equal(Shuffle(size, seed).find(numbers[::-1].copy()), whole[::-1])


def test_each_seed_and_epoch_has_its_own_order() -> None:
    orders = [Shuffle(1000, seed).find(count_up(epoch * 1000, 1000)) for seed in range(5) for epoch in range(5)]
    for first, order in enumerate(orders):
        for other in orders[:first]:
            assert (order == other).sum() < 20


def test_the_order_of_a_huge_corpus_needs_no_table() -> None:
    size = 10**12
    numbers = np.concatenate([count_up(0, 1000), count_up(size - 1000, 1000)])
    windows = Shuffle(size, 42).find(numbers)
    assert windows.min() >= 0
    assert windows.max() < size
    assert len(np.unique(windows)) == len(numbers)
    # Spread over the whole corpus: each tenth gets its share of the 2000, give or take five standard deviations.
    shares = np.bincount(windows // (size // 10), minlength=10)
    assert shares.min() > 130
    assert shares.max() < 270


@pytest.mark.parametrize("seed", range(5))
def test_the_permutation_looks_random(seed: int) -> None:
    size = 10_000
    order = permute(count_up(0, size), size, (seed, 0))
    assert (order == count_up(0, size)).sum() < 20
    assert (np.abs(np.diff(order)) == 1).sum() < 20
    assert abs(np.corrcoef(order, count_up(0, size))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_order_of_a_few_windows_is_as_likely(size: int) -> None:
    seeds = 100 * math.factorial(size)
    orders = Counter(tuple(Shuffle(size, seed).find(count_up(0, size)).tolist()) for seed in range(seeds))
    assert len(orders) == math.factorial(size)
    assert is_uniform(np.array(list(orders.values())))


@pytest.mark.parametrize("size", [6, 8, 16, 64, 65])
def test_every_pair_of_windows_is_as_likely_to_come_first(size: int) -> None:
    seeds = range(10_000 if size <= 64 else 4_000)  # one pair of a large shuffle takes long
    first, second = np.array([permute(count_up(0, 2), size, (seed, 0)) for seed in seeds]).T
    pairs = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    assert is_uniform(pairs[~np.eye(size, dtype=bool)])


def is_uniform(counts: np.ndarray) -> bool:
    """Chi-square test at four standard deviations."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float(((counts - expected) ** 2).sum() / expected) < freedom + 4 * math.sqrt(2 * freedom)


def test_the_order_never_changes_between_versions() -> None:
    # Resumed runs depend on these numbers: changing them changes what every existing run reads next.
    assert Shuffle(100, 1337).find(count_up(95, 10)).tolist() == [29, 4, 32, 3, 71, 9, 17, 99, 15, 89]
    assert Shuffle(5, 1337).find(count_up(0, 10)).tolist() == [3, 1, 4, 2, 0, 2, 4, 3, 0, 1]


COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0)


def make_shard_orders(counts: list[int], seed: int) -> list[Order]:
    array = np.array(counts, dtype=np.int64)
    return [ShardOrder(array), ShardOrder(array, seed), ShardOrder(array, seed, corpus=3)]


@given(counts=COUNTS, seed=SEEDS, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_every_epoch_by_shards_holds_every_window_once(counts: list[int], seed: int, epoch: int) -> None:
    size = sum(counts)
    for order in make_shard_orders(counts, seed):
        windows = order.find(count_up(epoch * size, 2 * size))
        np.testing.assert_array_equal(np.sort(windows[:size]), count_up(0, size))
        np.testing.assert_array_equal(np.sort(windows[size:]), count_up(0, size))


@given(counts=COUNTS, seed=SEEDS, start=st.integers(0, 10**4), cut=st.integers(0, 60))
@settings(deadline=None, max_examples=30)
def test_an_order_by_shards_is_the_same_however_it_is_asked_for(
    counts: list[int], seed: int, start: int, cut: int
) -> None:
    numbers = count_up(start, 60)
    for order in make_shard_orders(counts, seed):
        parts = [order.find(numbers[:cut]), order.find(numbers[cut:])]
        np.testing.assert_array_equal(np.concatenate(parts), order.find(numbers))


def test_inside_a_shard_windows_are_in_order_and_shards_move_as_a_whole() -> None:
    counts = np.array([5, 0, 3, 9, 4, 2, 7], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    order = ShardOrder(counts, seed=11)
    epochs = []
    for epoch in range(6):
        shards = order.list_shards(epoch)
        expected = np.concatenate([count_up(firsts[shard], counts[shard]) for shard in shards])
        np.testing.assert_array_equal(order.find(count_up(epoch * 30, 30)), expected)
        epochs.append(tuple(shards))
    assert len(set(epochs)) > 3


def test_the_stored_order_is_the_same_every_epoch() -> None:
    order = ShardOrder(np.array([5, 3], dtype=np.int64))
    assert order.find(count_up(0, 20)).tolist() == [*range(8), *range(8), *range(4)]


@given(counts=COUNTS, seed=st.none() | SEEDS, number=st.integers(0, 300))
@settings(deadline=None, max_examples=50)
def test_the_next_shards_are_those_that_are_read_next(counts: list[int], seed: int | None, number: int) -> None:
    array = np.array(counts, dtype=np.int64)
    order = ShardOrder(array, seed)
    ends = np.cumsum(array)
    to_the_end_of_next_epoch = (number // sum(counts) + 2) * sum(counts) - number
    shards = np.searchsorted(ends, order.find(count_up(number, to_the_end_of_next_epoch)), side="right")
    visits = [shards[0], *(b for a, b in pairwise(shards) if a != b)]
    upcoming = order.list_next_shards(number, 3)
    without_repeats = [shard for rank, shard in enumerate(upcoming) if rank == 0 or shard != upcoming[rank - 1]]
    assert without_repeats == visits[: len(without_repeats)]


def test_each_corpus_has_its_own_order_and_the_first_that_of_a_single_corpus() -> None:
    numbers = count_up(0, 1000)
    assert Shuffle(1000, 7, corpus=0).find(numbers).tolist() == Shuffle(1000, 7).find(numbers).tolist()
    orders = [Shuffle(1000, 7, corpus).find(numbers) for corpus in range(4)]
    for first, order in enumerate(orders):
        assert all((order == other).sum() < 20 for other in orders[:first])
