"""Curriculum: scores that belong to their corpus, and an order that is still a permutation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import make_config, prepare

from gptmill.config.errors import UserError
from gptmill.data.batches.curriculum import NUM_BANDS, Curriculum, score_windows
from gptmill.data.batches.order import Shuffle
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import SplitWindows, TokenShards
from gptmill.data.shards.scores import read_scores, score_by_length, write_scores

TEXTS = [("abc " * 100)[: 5 + 37 * number % 301] for number in range(60)]


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return prepare(tmp_path / "corpus", TEXTS, shard_tokens=1000)


def count_up(start: int, size: int) -> np.ndarray:
    return np.arange(start, start + size, dtype=np.int64)


@pytest.mark.slow
@given(size=st.integers(1, 700), seed=st.integers(0, 99), data=st.data())
@settings(deadline=None, max_examples=40)
def test_every_epoch_holds_every_window_once_and_the_first_follows_the_bands(
    size: int, seed: int, data: st.DataObject
) -> None:
    levels = data.draw(st.integers(1, 50))
    scores = np.random.default_rng(seed).integers(levels, size=size).astype(float)
    order = Curriculum(scores, seed)
    windows = order.find(count_up(0, 2 * size))
    for epoch in (windows[:size], windows[size:]):
        np.testing.assert_array_equal(np.sort(epoch), count_up(0, size))
    edges = np.arange(NUM_BANDS + 1) * size // NUM_BANDS
    bands = [scores[windows[first:end]] for first, end in pairwise(edges) if end > first]
    for easier, harder in pairwise(bands):
        assert easier.max() <= harder.min()
    np.testing.assert_array_equal(windows[size:], Shuffle(size, seed).find(count_up(size, size)))
    cut = data.draw(st.integers(0, 2 * size))
    parts = [order.find(count_up(0, cut)), order.find(count_up(cut, 2 * size - cut))]
    np.testing.assert_array_equal(np.concatenate(parts), windows)


def test_inside_a_band_each_seed_has_its_own_order() -> None:
    scores = np.arange(10_000, dtype=float)
    first, second = (Curriculum(scores, seed).find(count_up(0, 10_000)) for seed in (1, 2))
    assert (first == second).mean() < 0.05
    assert (first == count_up(0, 10_000)).mean() < 0.05


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    shard_tokens=st.integers(3, 200),
    context_length=st.integers(1, 20),
)
@settings(deadline=None)
def test_a_window_has_the_mean_score_of_its_tokens(lengths: list[int], shard_tokens: int, context_length: int) -> None:
    scores = np.random.default_rng(len(lengths)).normal(size=len(lengths)).astype(np.float32)
    by_token = np.repeat(scores.astype(float), lengths)
    cuts = range(shard_tokens, len(by_token), shard_tokens)
    arrays = tuple(np.split(np.zeros(len(by_token), dtype=np.uint16), cuts))
    starts = np.cumsum([0, *lengths[:-1]])
    own = [starts[starts // shard_tokens == shard] % shard_tokens for shard in range(len(arrays))]
    windows = SplitWindows(arrays, context_length)
    expected = [
        part[start : start + context_length].mean()
        for part in np.split(by_token, cuts)
        for start in range(0, len(part) - context_length, context_length)
    ]
    np.testing.assert_allclose(score_windows(windows, own, scores), expected, atol=1e-6)


def test_the_length_of_a_document_is_its_tokens(shards: TokenShards) -> None:
    tokens = np.concatenate(shards.train)
    starts = np.flatnonzero(tokens == shards.tokenizer.end_of_text)
    assert score_by_length(shards).tolist() == np.diff([*starts, len(tokens)]).tolist()


def test_scores_survive_a_round_trip(shards: TokenShards) -> None:
    scores = score_by_length(shards)
    path = write_scores(shards.folder, "length", scores)
    assert path == shards.folder / "scores" / "length.npy"
    np.testing.assert_array_equal(read_scores(shards, "length"), scores)
    write_scores(shards.folder, "length", -scores)
    np.testing.assert_array_equal(read_scores(shards, "length"), -scores)


def test_missing_scores_are_refused_with_the_command_that_creates_them(shards: TokenShards) -> None:
    with pytest.raises(UserError, match=f"gptmill data score {shards.folder} --by length"):
        read_scores(shards, "length")
    with pytest.raises(UserError, match="--by loss"):
        build_sampler(make_config(order="curriculum", score="loss"), Corpora((shards,)))


def test_scores_that_do_not_fit_are_not_written(shards: TokenShards) -> None:
    scores = score_by_length(shards)
    for wrong in (scores[:-1], scores * np.float32(np.nan), scores[None]):
        with pytest.raises(UserError, match=f"{len(scores)} finite numbers"):
            write_scores(shards.folder, "length", wrong)
    with pytest.raises(UserError, match="plain name"):
        write_scores(shards.folder, "../length", scores)


@pytest.mark.parametrize("kind", ["bytes", "corpus", "sidecar", "no_sidecar"])
def test_scores_that_are_damaged_or_of_another_corpus_are_refused(shards: TokenShards, kind: str) -> None:
    path = write_scores(shards.folder, "length", score_by_length(shards))
    sidecar = path.with_suffix(".json")
    if kind == "bytes":
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    elif kind == "corpus":
        sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "corpus_sha256": "0"}))
    elif kind == "sidecar":
        sidecar.write_text("{")
    else:
        sidecar.unlink()
    with pytest.raises(UserError, match="gptmill data score"):
        read_scores(shards, "length")


def test_training_by_length_begins_with_short_documents(shards: TokenShards) -> None:
    write_scores(shards.folder, "length", score_by_length(shards))
    sampler = build_sampler(make_config(order="curriculum", mini_batch_size=1), Corpora((shards,)))
    windows = shards.cut(shards.train, 16)
    by_window = score_windows(windows, shards.train_starts, score_by_length(shards))
    firsts = np.cumsum(windows.counts) - windows.counts
    locations = [sampler.find(number) for number in range(sampler.samples_per_epoch)]
    read = np.array([firsts[each.shards[0]] + each.starts[0] // 16 for each in locations])
    means = [part.mean() for part in np.array_split(by_window[read], 4)]
    assert means == sorted(means)
    assert means[0] < means[-1] / 2
