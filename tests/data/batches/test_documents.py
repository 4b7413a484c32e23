"""Whole documents: every token of every document once per epoch, in few shapes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import make_config, make_train_reader, prepare

from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.document_groups import DocumentGroups, cut_documents, list_widths
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora

IGNORED = -100
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=60)


def split_into_shards(lengths: list[int], shard_tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sizes and document starts of the shards that preparing documents of these lengths gives."""
    total = sum(lengths)
    sizes = [min(shard_tokens, total - first) for first in range(0, total, shard_tokens)]
    starts = np.cumsum([0, *lengths[:-1]])
    return np.array(sizes), [starts[starts // shard_tokens == shard] % shard_tokens for shard in range(len(sizes))]


@given(lengths=LENGTHS, shard_tokens=st.integers(2, 400), longest=st.integers(1, 64))
@settings(deadline=None)
def test_pieces_cover_every_document_once(lengths: list[int], shard_tokens: int, longest: int) -> None:
    sizes, starts = split_into_shards(lengths, shard_tokens)
    pieces = cut_documents(sizes, starts, longest)
    assert pieces.lengths.min(initial=longest) >= 1
    assert pieces.lengths.max(initial=0) <= longest
    covered = [np.zeros(size, dtype=int) for size in sizes]
    for shard, start, length in zip(pieces.shards, pieces.starts, pieces.lengths, strict=True):
        covered[shard][start : start + length] += 1
        # No document starts inside a piece.
        assert not ((starts[shard] > start) & (starts[shard] < start + length)).any()
    for shard, counts in enumerate(covered):
        goes_on = shard + 1 < len(sizes) and not (len(starts[shard + 1]) and starts[shard + 1][0] == 0)
        assert counts.tolist() == [1] * (len(counts) - goes_on) + [0] * goes_on


@given(lengths=LENGTHS, seed=st.integers(0, 99), epoch=st.integers(0, 50), rows=st.integers(1, 5), data=st.data())
@settings(deadline=None, max_examples=50)
def test_an_epoch_of_groups_holds_every_piece_once(
    lengths: list[int], seed: int, epoch: int, rows: int, data: st.DataObject
) -> None:
    longest = data.draw(st.sampled_from([16, 33, 64]))
    pieces = cut_documents(*split_into_shards(lengths, 10**6), longest)
    groups = DocumentGroups(pieces, longest, rows * longest, seed)
    seen: Counter[int] = Counter()
    for number in range(epoch * groups.num_groups, (epoch + 1) * groups.num_groups):
        chosen, width, count = groups.find(number)
        assert width in list_widths(longest)
        assert count == rows * longest // width
        assert 1 <= len(chosen) <= count
        assert pieces.lengths[chosen].max() <= width
        assert width == min(list_widths(longest)) or pieces.lengths[chosen].min() > width // 2
        seen.update(chosen.tolist())
    assert seen == Counter(range(len(pieces.lengths)))


@pytest.mark.slow
def test_each_epoch_seed_and_corpus_has_its_own_order() -> None:
    pieces = cut_documents(*split_into_shards([5 + number % 60 for number in range(3000)], 10**6), 64)
    orders = []
    for seed, corpus in ((1, 0), (2, 0), (1, 1)):
        groups = DocumentGroups(pieces, 64, 4 * 64, seed, corpus)
        for epoch in range(2):
            numbers = range(epoch * groups.num_groups, (epoch + 1) * groups.num_groups)
            orders.append(np.concatenate([groups.find(number)[0] for number in numbers]))
    for first, order in enumerate(orders):
        assert all((order == other).mean() < 0.05 for other in orders[:first])


@pytest.mark.parametrize(("longest", "widths"), [(1, [1]), (16, [16]), (64, [16, 32, 64]), (100, [25, 50, 100])])
def test_widths_are_halves(longest: int, widths: list[int]) -> None:
    assert list_widths(longest) == widths


@pytest.mark.parametrize("shard_tokens", [700, 100_000])
def test_rows_are_the_documents_themselves(tmp_path: Path, shard_tokens: int) -> None:
    texts = [("abcdefgh" * 40)[: 1 + 7 * number % 150] for number in range(80)]
    shards = prepare(tmp_path / "corpus", texts, shard_tokens)
    corpora = Corpora((shards,))
    config = make_config(documents="whole", context_length=64, mini_batch_size=2)
    sampler, reader = build_sampler(config, corpora), make_train_reader(corpora)
    end = shards.tokenizer.end_of_text
    inputs, pairs = Counter[int](), Counter[tuple[int, int]]()
    targets = 0
    for number in range(sampler.samples_per_epoch):
        batch = make_batch(reader.read(sampler.find(number)), IGNORED)
        assert batch.tokens.numel() <= 2 * 64
        valid = batch.targets != IGNORED
        assert int(valid.sum()) == sampler.count_targets(number, 1)
        targets += int(valid.sum())
        inputs.update(batch.tokens[valid].tolist())
        pairs.update(zip(batch.tokens[valid].tolist(), batch.targets[valid].tolist(), strict=True))
        assert not (batch.tokens[:, 1:][valid[:, 1:]] == end).any(), "a document begins inside a row"
    assert sampler.count_targets(0, sampler.samples_per_epoch) == targets
    stored = np.concatenate(shards.train).tolist()
    expected = Counter(zip(stored, [*stored[1:], end], strict=True))
    # Where a document continues in the next shard, the input-target pair across the boundary is skipped.
    left_out = sum((expected - pairs).values())
    assert not pairs - expected
    assert left_out <= len(shards.train) - 1
    assert (left_out > 0) == (shard_tokens == 700)


def test_a_mixture_of_groups_keeps_the_weights(tmp_path: Path) -> None:
    one, two = (prepare(tmp_path / name, [name * (5 + number % 40) for number in range(60)]) for name in "ab")
    corpora = Corpora((one, two), (Fraction(3), Fraction(1)))
    sampler = build_sampler(make_config(documents="whole"), corpora)
    drawn = Counter(int(sampler.find(number).corpora[0]) for number in range(40))
    assert drawn == {0: 30, 1: 10}
