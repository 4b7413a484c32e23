"""Mixture weights: exact apportionment in any prefix, computed directly for any sample number."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.data.batches.mixture_weights import MixtureWeights

WEIGHTS = st.lists(
    st.fractions(min_value=Fraction(1, 500), max_value=1000, max_denominator=500), min_size=1, max_size=6
)


def merge_by_hand(weights: list[Fraction], size: int) -> list[tuple[int, int]]:
    """The definition: all samples by ideal time, ties by corpus."""
    times = [
        (Fraction(2 * number + 1) / (2 * weight), corpus, number)
        for corpus, weight in enumerate(weights)
        for number in range(size)
    ]
    return [(corpus, number) for _, corpus, number in sorted(times)[:size]]


@given(weights=WEIGHTS, size=st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_samples_come_in_the_order_of_their_ideal_times(weights: list[Fraction], size: int) -> None:
    corpora, numbers = MixtureWeights(weights).assign(0, size)
    assert list(zip(corpora.tolist(), numbers.tolist(), strict=True)) == merge_by_hand(weights, size)


@given(weights=WEIGHTS, start=st.integers(0, 10**15), size=st.integers(0, 40))
@settings(deadline=None)
def test_any_prefix_is_counted_without_iterating_over_it(weights: list[Fraction], start: int, size: int) -> None:
    shares = MixtureWeights(weights)
    before, after = shares.count(start), shares.count(start + size)
    assert (sum(before), sum(after)) == (start, start + size)
    corpora, numbers = shares.assign(start, size)
    for corpus, (first, end) in enumerate(zip(before, after, strict=True)):
        assert numbers[corpora == corpus].tolist() == list(range(first, end))


@given(weights=WEIGHTS, total=st.integers(0, 10**15))
@settings(deadline=None)
def test_every_corpus_stays_within_the_bound_of_its_share(weights: list[Fraction], total: int) -> None:
    for count, weight in zip(MixtureWeights(weights).count(total), weights, strict=True):
        share = weight / sum(weights)
        bound = (1 + (len(weights) - 2) * share) / 2 if len(weights) > 1 else 0
        assert abs(count - total * share) <= bound


@given(weights=WEIGHTS, factor=st.fractions(min_value=Fraction(1, 97), max_value=97), start=st.integers(0, 10**6))
@settings(deadline=None)
def test_only_the_ratio_of_the_weights_matters(weights: list[Fraction], factor: Fraction, start: int) -> None:
    scaled = MixtureWeights([weight * factor for weight in weights])
    assert scaled.weights == MixtureWeights(weights).weights
    np.testing.assert_array_equal(scaled.assign(start, 20), MixtureWeights(weights).assign(start, 20))


def test_the_sequence_never_changes_between_versions() -> None:
    corpora, _ = MixtureWeights([Fraction("0.7"), Fraction("0.3")]).assign(10**12, 10)
    assert corpora.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
