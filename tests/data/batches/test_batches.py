"""Batches: pure functions of their sample numbers, the same rows however the samples are partitioned."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import CONTEXT_LENGTH, END_OF_TEXT, make_reader, make_windows, prepare

from gptmill.config.errors import UserError
from gptmill.data.batches.batch import Batch, find_documents, make_batch
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.order import Shuffle
from gptmill.data.batches.row_reader import HostReader, RowLocations, Rows
from gptmill.data.batches.samplers import WindowSampler
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.batches.window_offset import WindowOffset
from gptmill.data.run_corpora import Corpora

IGNORED = -100
ONE = MixtureWeights([Fraction(1)])


def read(num_windows: int, seed: int, start: int, size: int, *, shifted: bool = False) -> Batch:
    windows = make_windows(num_windows)
    shifts = [WindowOffset(windows, seed)] if shifted else None
    sampler = WindowSampler([windows], [Shuffle(num_windows, seed)], ONE, size, shifts)
    return make_batch(make_reader(windows).read(sampler.find(start)), IGNORED)


def list_numbers(tokens: torch.Tensor) -> list[int]:
    return (tokens[:, 0] // CONTEXT_LENGTH).tolist()


def test_targets_are_the_tokens_shifted_by_one() -> None:
    batch = read(50, seed=3, start=7, size=20)
    assert batch.tokens.shape == batch.targets.shape == (20, CONTEXT_LENGTH)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)  # the tokens of these windows count up
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
    assert batch.documents is None


def test_training_follows_the_order_of_windows_across_epochs() -> None:
    batch = read(50, seed=3, start=30, size=90)
    assert list_numbers(batch.tokens) == Shuffle(50, 3).find(np.arange(30, 120)).tolist()
    assert sorted(list_numbers(batch.tokens[20:70])) == list(range(50))


@given(
    num_windows=st.integers(1, 60),
    seed=st.integers(0, 1000),
    start=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    shifted=st.booleans(),
)
@settings(deadline=None)
def test_any_partition_reads_the_same_rows(
    num_windows: int, seed: int, start: int, sizes: list[int], shifted: bool
) -> None:
    whole = read(num_windows, seed, start, sum(sizes), shifted=shifted)
    starts = accumulate(sizes[:-1], initial=start)
    parts = [read(num_windows, seed, first, size, shifted=shifted) for first, size in zip(starts, sizes, strict=True)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_window_offsets_change_every_epoch_and_skip_almost_nothing() -> None:
    """None in the first epoch, later less than a window; only tokens before a shard's first window are skipped."""
    count = 50
    epochs = [sorted(read(count, 3, epoch * count, count, shifted=True).tokens.tolist()) for epoch in range(6)]
    assert [row[0] for row in epochs[0]] == list(range(0, count * CONTEXT_LENGTH, CONTEXT_LENGTH))
    distances = []
    for rows in epochs:
        assert all(row == list(range(row[0], row[0] + CONTEXT_LENGTH)) for row in rows)
        covered = {token for row in rows for token in row}
        assert len(covered) > count * CONTEXT_LENGTH - 2 * CONTEXT_LENGTH
        distances.append(rows[0][0])
    assert set(distances) <= set(range(CONTEXT_LENGTH))
    assert len(set(distances)) > 2


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    reader = HostReader([[np.arange(7, dtype=np.uint16)]], end_of_text=0, vocab_size=6)
    zero = np.zeros(1, dtype=np.int64)
    assert reader.read(RowLocations(zero, zero, zero, 4)).tokens.max() == 4
    with pytest.raises(UserError, match="token 6"):
        reader.read(RowLocations(zero, zero, zero, 6))


def test_a_row_that_ends_with_its_shard_is_followed_by_end_of_text() -> None:
    reader = HostReader([[np.arange(6, dtype=np.uint16)]], end_of_text=9, vocab_size=10)
    places = RowLocations(np.zeros(3, int), np.zeros(3, int), np.array([2, 0, 0]), 4, np.array([4, 2, 0]))
    batch = make_batch(reader.read(places), IGNORED)
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [0, 1, 2, 9], [0, 9, 9, 9]]
    assert batch.targets.tolist() == [[3, 4, 5, 9], [1, 2, IGNORED, IGNORED], [IGNORED] * 4]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_shorter_rows_hold_the_same_pairs_in_the_same_order(width: int) -> None:
    rows = Rows(torch.arange(27).view(3, 9))
    full, cut = make_batch(rows, IGNORED), make_batch(rows, IGNORED, width=width)
    assert cut.tokens.shape == (24 // width, width)
    assert torch.equal(cut.tokens.flatten(), full.tokens.flatten())
    assert torch.equal(cut.targets.flatten(), full.targets.flatten())


def test_documents_start_at_their_separator() -> None:
    tokens = torch.tensor([[5, 6, 0, 7, 8, 0, 0, 9], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert find_documents(tokens, 0).tolist() == [[0, 0, 2, 2, 2, 5, 6, 6], [0] * 8]
    # A row split in two starts afresh: documents do not reach across the split.
    batch = make_batch(Rows(torch.cat([tokens, torch.ones(2, 1, dtype=torch.int64)], dim=1)), IGNORED, 0, width=4)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 2, 2], [0, 1, 2, 2], [0] * 4, [0] * 4]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """Weights 3 and 1, with far more validation text in the first corpus."""
    folder: Path = tmp_path_factory.mktemp("val")
    large, small = prepare(folder / "large", ["abc " * 9000]), prepare(folder / "small", ["xyz " * 900])
    return Corpora((large, small), (Fraction(3), Fraction(1)))


def read_whole_val(windows: ValWindows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [make_batch(windows.read(start, size), IGNORED) for start in range(0, windows.num_chosen, size)]
    assert {batch.tokens.shape for batch in batches} == {(size, 16)}
    return torch.cat([batch.tokens for batch in batches]), torch.cat([batch.targets for batch in batches])


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize("wanted", [1, 10, 10**6])
def test_validation_scores_the_same_windows_in_batches_of_any_size(corpora: Corpora, wanted: int, size: int) -> None:
    windows = ValWindows(corpora, 16, wanted)
    expected_tokens, expected_targets = read_whole_val(windows, size=1)
    tokens, targets = read_whole_val(windows, size)
    assert torch.equal(tokens[: windows.num_chosen], expected_tokens)
    assert torch.equal(targets[: windows.num_chosen], expected_targets)
    assert (targets[windows.num_chosen :] == IGNORED).all()
    assert (targets[: windows.num_chosen] != IGNORED).all()


@pytest.mark.parametrize("wanted", [4, 40, 10**6])
def test_validation_windows_are_divided_by_weight(corpora: Corpora, wanted: int) -> None:
    windows = ValWindows(corpora, 16, wanted)
    tokens, _ = read_whole_val(windows, windows.num_chosen)
    of_small = int((tokens == ord("x")).any(dim=1).sum())
    assert of_small == corpora.mixture.count(windows.num_chosen)[1]
    assert abs(of_small - windows.num_chosen / 4) <= 0.5
    small = corpora.shards[1]
    if wanted == 10**6:  # as many as the smaller corpus has its share of
        assert of_small == small.cut(small.val, 16).num_windows


@given(num_windows=st.integers(1, 200), share=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_validation_windows_are_spread_evenly(num_windows: int, share: float) -> None:
    num_chosen = max(1, round(share * num_windows))
    windows = make_windows(num_windows)

    class Shards:
        """The part of TokenShards that validation uses."""

        val = windows.arrays
        tokenizer = type("Tokenizer", (), {"end_of_text": END_OF_TEXT, "vocab_size": 1 << 16})

        def cut(self, *_: object) -> object:
            return windows

    chosen = ValWindows(Corpora((Shards(),)), CONTEXT_LENGTH, num_chosen)  # type: ignore[arg-type]
    assert chosen.num_chosen == num_chosen
    numbers = np.array(list_numbers(chosen.read(0, num_chosen).tokens))
    assert numbers[0] == 0
    gaps = np.diff([*numbers, num_windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def test_a_validation_batch_wholly_past_the_end_is_wholly_ignored(corpora: Corpora) -> None:
    batch = make_batch(ValWindows(corpora, 16, 5).read(100, 4), IGNORED)
    assert batch.tokens.shape == (4, 16)
    assert (batch.targets == IGNORED).all()
