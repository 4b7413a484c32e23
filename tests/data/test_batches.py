"""Batches: pure functions of their numbers, the same rows for whoever asks, in pieces of any size."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.data.batches import read_train_batch, read_val_batch
from gptmill.data.order import make_window_order
from gptmill.data.shards import SplitWindows

CONTEXT_LENGTH = 8
IGNORED = -100


def make_windows(num_windows: int) -> SplitWindows:
    """Tokens count up over two shards, so that a window's first token tells its number."""
    cut = CONTEXT_LENGTH * (num_windows // 3) + 1
    tokens = np.arange(CONTEXT_LENGTH * num_windows + 1, dtype=np.uint16)
    arrays = (tokens[:cut], tokens[cut - 1 :])
    windows = SplitWindows(arrays, CONTEXT_LENGTH, vocab_size=1 << 16)
    assert windows.num_windows == num_windows
    return windows


def list_numbers(tokens: torch.Tensor) -> list[int]:
    return (tokens[:, 0] // CONTEXT_LENGTH).tolist()


def test_targets_are_the_tokens_one_place_on() -> None:
    batch = read_train_batch(make_windows(50), seed=3, start=7, size=20)
    assert batch.tokens.shape == batch.targets.shape == (20, CONTEXT_LENGTH)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)  # the tokens of these windows count up
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])


def test_training_follows_the_order_of_windows_across_epochs() -> None:
    batch = read_train_batch(make_windows(50), seed=3, start=30, size=90)
    expected = make_window_order(np.arange(30, 120), 50, 3)
    assert list_numbers(batch.tokens) == expected.tolist()
    assert sorted(list_numbers(batch.tokens[20:70])) == list(range(50))


@given(
    num_windows=st.integers(1, 60),
    seed=st.integers(0, 1000),
    start=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_any_partition_reads_the_same_rows(num_windows: int, seed: int, start: int, sizes: list[int]) -> None:
    windows = make_windows(num_windows)
    whole = read_train_batch(windows, seed, start, sum(sizes))
    starts = accumulate(sizes[:-1], initial=start)
    parts = [read_train_batch(windows, seed, first, size) for first, size in zip(starts, sizes, strict=True)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def read_whole_val(windows: SplitWindows, num_chosen: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [read_val_batch(windows, num_chosen, start, size, IGNORED) for start in range(0, num_chosen, size)]
    assert {batch.tokens.shape for batch in batches} == {(size, CONTEXT_LENGTH)}
    return torch.cat([batch.tokens for batch in batches]), torch.cat([batch.targets for batch in batches])


@given(num_windows=st.integers(1, 200), share=st.floats(0, 1))
@settings(deadline=None)
def test_validation_windows_are_spread_evenly(num_windows: int, share: float) -> None:
    num_chosen = max(1, round(share * num_windows))
    tokens, targets = read_whole_val(make_windows(num_windows), num_chosen, size=num_chosen)
    numbers = np.array(list_numbers(tokens))
    assert torch.equal(targets, tokens + 1)
    assert numbers[0] == 0
    gaps = np.diff([*numbers, num_windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


@given(num_windows=st.integers(1, 60), share=st.floats(0, 1), size=st.integers(1, 70))
@settings(deadline=None)
def test_validation_scores_the_same_windows_in_batches_of_any_size(num_windows: int, share: float, size: int) -> None:
    windows = make_windows(num_windows)
    num_chosen = max(1, round(share * num_windows))
    expected_tokens, expected_targets = read_whole_val(windows, num_chosen, size=1)
    tokens, targets = read_whole_val(windows, num_chosen, size)
    assert torch.equal(tokens[:num_chosen], expected_tokens)
    assert torch.equal(targets[:num_chosen], expected_targets)
    assert (targets[num_chosen:] == IGNORED).all()
    assert (targets[:num_chosen] != IGNORED).all()


def test_a_validation_batch_wholly_past_the_end_is_wholly_ignored() -> None:
    batch = read_val_batch(make_windows(10), 5, 100, 4, IGNORED)
    assert batch.tokens.shape == (4, CONTEXT_LENGTH)
    assert (batch.targets == IGNORED).all()


@pytest.mark.parametrize("read", [lambda w: read_train_batch(w, 1, 0, 6), lambda w: read_val_batch(w, 5, 0, 6, -100)])
def test_a_batch_stays_as_it_is_on_the_cpu(read: object) -> None:
    batch = read(make_windows(10))  # type: ignore[operator]
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens)
    assert torch.equal(moved.targets, batch.targets)
    assert moved.tokens.is_contiguous()
