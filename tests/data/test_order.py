"""The order of windows: a permutation per epoch, a pure function of its key, without a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.data.order import make_window_order, permute

KEYS = st.lists(st.integers(0, 2**70), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**64)


def count_up(start: int, size: int) -> np.ndarray:
    return np.arange(start, start + size, dtype=np.int64)


@given(size=st.integers(1, 5000), key=KEYS)
@settings(deadline=None)
def test_permute_hits_every_place_once(size: int, key: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(np.sort(permute(count_up(0, size), size, key)), count_up(0, size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4**8, 4**8 + 1])
def test_permute_hits_every_place_once_around_powers_of_two(size: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(count_up(0, size), size, (7, 3))), count_up(0, size))


@given(size=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 1000), count=st.integers(1, 4))
@settings(deadline=None)
def test_every_epoch_holds_every_window_once(size: int, seed: int, epoch: int, count: int) -> None:
    windows = make_window_order(count_up(epoch * size, count * size), size, seed)
    for place in range(count):
        np.testing.assert_array_equal(np.sort(windows[place * size : (place + 1) * size]), count_up(0, size))


@given(size=st.integers(1, 50), seed=SEEDS, start=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 120), max_size=5))
@settings(deadline=None, max_examples=30)
def test_the_order_is_the_same_however_it_is_asked_for(size: int, seed: int, start: int, cuts: list[int]) -> None:
    numbers = count_up(start, 120)
    whole = make_window_order(numbers, size, seed)
    parts = np.split(numbers, sorted(cuts))
    np.testing.assert_array_equal(np.concatenate([make_window_order(part, size, seed) for part in parts]), whole)
    one_by_one = [int(make_window_order(number[None], size, seed)[0]) for number in numbers]
    np.testing.assert_array_equal(one_by_one, whole)
    np.testing.assert_array_equal(make_window_order(numbers[::-1].copy(), size, seed), whole[::-1])


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [make_window_order(count_up(epoch * 1000, 1000), 1000, seed) for seed in range(5) for epoch in range(5)]
    for first, order in enumerate(orders):
        for other in orders[:first]:
            assert (order == other).sum() < 20


def test_the_order_of_a_huge_corpus_needs_no_table() -> None:
    size = 10**12
    numbers = np.concatenate([count_up(0, 1000), count_up(size - 1000, 1000)])
    windows = make_window_order(numbers, size, 42)
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


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run depends on these numbers: a change of theirs changes what every run in the world reads next.
    assert make_window_order(count_up(95, 10), 100, 1337).tolist() == [29, 4, 32, 3, 71, 9, 17, 99, 15, 89]
