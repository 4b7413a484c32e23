"""Mixtures: several corpora read in exact proportions, each through its own epochs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import CONTEXT_LENGTH, make_config, make_reader, make_windows, prepare

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.config.run import DataConfig
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.order import Order, ShardOrder, Shuffle
from gptmill.data.batches.samplers import WindowSampler, build_sampler
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import open_corpora

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


def build_mixture(sizes: list[int], kind: str, batch_size: int) -> tuple[WindowSampler, MixtureWeights, list[int]]:
    """Corpora whose tokens continue where the previous corpus ends; corpus i has weight 2i + 1."""
    firsts = [sum(sizes[:corpus]) for corpus in range(len(sizes))]
    windows = [make_windows(size, first * CONTEXT_LENGTH) for size, first in zip(sizes, firsts, strict=True)]
    orders: list[Order] = [
        Shuffle(size, 5, corpus) if kind == "shuffle" else ShardOrder(part.counts, 5, corpus)
        for corpus, (size, part) in enumerate(zip(sizes, windows, strict=True))
    ]
    shares = MixtureWeights([Fraction(2 * corpus + 1) for corpus in range(len(sizes))])
    return WindowSampler(windows, orders, shares, batch_size), shares, firsts


def read_numbers(sampler: WindowSampler, sizes: list[int], start: int, batches: int) -> list[int]:
    """The numbers, over all corpora, of the windows of some micro-batches."""
    firsts = [sum(sizes[:corpus]) for corpus in range(len(sizes))]
    reader = make_reader(
        *(make_windows(size, first * CONTEXT_LENGTH) for size, first in zip(sizes, firsts, strict=True))
    )
    locations = [sampler.find(start + batch * sampler.samples_per_batch) for batch in range(batches)]
    return [int(row[0]) // CONTEXT_LENGTH for each in locations for row in reader.read(each).tokens]


@given(sizes=SIZES, kind=st.sampled_from(["shuffle", "shards"]), epochs=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_each_corpus_is_read_in_epochs_of_its_own(sizes: list[int], kind: str, epochs: int) -> None:
    sampler, shares, firsts = build_mixture(sizes, kind, batch_size=7)
    assert sampler.samples_per_epoch == sum(sizes)
    length = epochs * sum(sizes)
    numbers = read_numbers(sampler, sizes, 0, -(-length // 7))
    for corpus, (size, first, count) in enumerate(zip(sizes, firsts, shares.count(len(numbers)), strict=True)):
        own = [number for number in numbers if first <= number < first + size]
        assert len(own) == count, corpus
        for epoch in range(count // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(first, first + size))
        last = own[count // size * size :]
        assert len(set(last)) == len(last)


@given(sizes=SIZES, start=st.integers(0, 10**5), batch_size=st.sampled_from([1, 2, 3, 4, 6]))
@settings(deadline=None, max_examples=30)
def test_batches_of_any_size_read_the_same_windows(sizes: list[int], start: int, batch_size: int) -> None:
    whole, _, _ = build_mixture(sizes, "shuffle", 12)
    parts, _, _ = build_mixture(sizes, "shuffle", batch_size)
    assert read_numbers(parts, sizes, start, 12 // batch_size) == read_numbers(whole, sizes, start, 1)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path / "a", ["abc " * 500])
    prepare(tmp_path / "b", ["xyz " * 500])
    return tmp_path


@pytest.mark.usefixtures("folders")
def test_a_mixture_opens_with_its_weights() -> None:
    corpora = open_corpora(DataConfig(mixture="a=0.7, b=0.3"))
    assert [str(shards.folder) for shards in corpora.shards] == ["a", "b"]
    assert corpora.name == "a (0.7), b (0.3)"
    sampler = build_sampler(make_config(mixture="a=0.7,b=0.3"), corpora)
    drawn = Counter(int(corpus) for start in range(0, 100, 4) for corpus in sampler.find(start).corpora)
    assert drawn == {0: 70, 1: 30}


@pytest.mark.usefixtures("folders")
def test_the_checksum_tells_corpora_order_and_weights_apart() -> None:
    mixtures = ["a=0.7,b=0.3", "a=0.3,b=0.7", "b=0.7,a=0.3", "a=1,b=1"]
    assert len({open_corpora(DataConfig(mixture=mixture)).sha256 for mixture in mixtures}) == 4
    assert open_corpora(DataConfig(mixture="a=7,b=3")).sha256 == open_corpora(DataConfig(mixture=mixtures[0])).sha256
    alone = open_corpora(DataConfig(data_dir="a"))
    assert alone.sha256 == alone.shards[0].manifest.corpus_sha256
    assert open_corpora(DataConfig(mixture="a=5")).sha256 == alone.sha256


@pytest.mark.usefixtures("folders")
def test_a_mixture_of_one_corpus_equals_the_plain_run() -> None:
    alone = build_sampler(make_config(data_dir="a"), open_corpora(DataConfig(data_dir="a")))
    mixed = build_sampler(make_config(mixture="a=3"), open_corpora(DataConfig(mixture="a=3")))
    for start in (0, 4, 120, 1000):
        np.testing.assert_array_equal(alone.find(start).starts, mixed.find(start).starts)


def test_corpora_of_two_tokenizers_are_refused_with_both_named(folders: Path) -> None:
    (folders / "c.txt").write_text("xyz " * 500, encoding="utf-8")
    prepare_corpus([str(folders / "c.txt")], PrepareRequest(out="c", tokenizer="char"), lambda _: None)
    with pytest.raises(UserError, match=r"a was prepared with byte:\w+, c with char:\w+"):
        open_corpora(DataConfig(mixture="a=1,c=1"))
