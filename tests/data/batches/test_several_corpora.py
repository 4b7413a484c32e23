"""Several corpora in one run: each has its own order, its own position, and its own share of validation."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from windows import make_config, make_train_reader, prepare

from gptmill.config.errors import UserError
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.batches.on_device import load_on_device
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.scores import score_by_length, write_scores

CPU = torch.device("cpu")
TEXTS = [("abc " * 100)[: 5 + 37 * number % 301] for number in range(400)]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """The same text twice: only the index of the corpus distinguishes their orders."""
    folder: Path = tmp_path_factory.mktemp("twins")
    parts = tuple(prepare(folder / name, TEXTS, shard_tokens=2000) for name in "ab")
    for part in parts:
        write_scores(part.folder, "length", score_by_length(part))
    return Corpora(parts, (Fraction(1), Fraction(1)))


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "fields", [{"order": "shuffle"}, {"order": "shards"}, {"order": "curriculum"}, {"documents": "whole"}], ids=str
)
def test_corpora_of_a_mixture_have_orders_of_their_own(twins: Corpora, fields: dict[str, str], epoch: int) -> None:
    sampler = build_sampler(make_config(**fields, mini_batch_size=2), twins)
    read: tuple[list[tuple[int, int]], ...] = ([], [])
    first = epoch * sampler.samples_per_epoch
    for start in range(first, first + min(400, sampler.samples_per_epoch), sampler.samples_per_batch):
        locations = sampler.find(start)
        for corpus, shard, place in zip(locations.corpora, locations.shards, locations.starts, strict=True):
            read[corpus].append((int(shard), int(place)))
    size = min(map(len, read))
    same = sum(one == other for one, other in zip(read[0][:size], read[1][:size], strict=True))
    assert same < size / 2


@pytest.mark.slow
def test_upcoming_shards_follow_the_position_of_each_corpus(twins: Corpora) -> None:
    sampler = build_sampler(make_config(order="sequential"), twins)
    for start in range(0, sampler.samples_per_epoch, 4):
        locations, ahead = sampler.find(start), sampler.list_next_shards(start)
        for corpus in range(2):
            assert ahead[corpus][0] == locations.shards[locations.corpora == corpus][0]


def test_an_on_device_dataset_refuses_tokens_outside_the_vocabulary(twins: Corpora) -> None:
    shards = replace(twins.shards[0], train=(np.array([1, 2, 257], dtype=np.uint16),))
    with pytest.raises(UserError, match="token 257"):
        load_on_device(Corpora((shards,)), torch.device("cpu"))


@pytest.mark.parametrize("wide_first", [False, True])
def test_an_on_device_dataset_may_mix_token_widths(twins: Corpora, wide_first: bool) -> None:
    one, two = twins.shards
    wide = replace(
        two,
        manifest=replace(two.manifest, dtype="uint32"),
        train=tuple(array.astype(np.uint32) for array in two.train),
    )
    mixed = replace(twins, shards=(wide, one) if wide_first else (one, wide))
    sampler = build_sampler(make_config(), twins)
    cpu = torch.device("cpu")
    for start in (0, 40, 400):
        expected = load_on_device(twins, cpu).read(sampler.find(start)).tokens
        assert torch.equal(load_on_device(mixed, cpu).read(sampler.find(start)).tokens, expected)


def test_validation_of_a_mixture_is_spread_over_each_corpus(tmp_path: Path) -> None:
    texts = [f"{number:03d} " * 30 for number in range(300)]
    large, small = prepare(tmp_path / "l", texts), prepare(tmp_path / "s", texts[:150])
    corpora = Corpora((large, small), (Fraction(3), Fraction(1)))
    chosen = ValWindows(corpora, 16, 40)
    counts = corpora.mixture.count(40)
    for corpus, shards in enumerate(corpora.shards):
        windows = shards.cut(shards.val, 16)
        own = chosen.read(0, 40).tokens.tolist()
        spread = np.arange(counts[corpus]) * windows.num_windows // counts[corpus]
        expected = [
            shards.val[shard][start : start + 17].tolist() for shard, start in zip(*windows.locate(spread), strict=True)
        ]
        corpora_of, _ = corpora.mixture.assign(0, 40)
        assert [row for row, of in zip(own, corpora_of, strict=True) if of == corpus] == expected


@pytest.mark.parametrize("documents", ["packed", "whole"])
def test_every_row_of_a_mixture_names_its_corpus_wherever_its_tokens_are(twins: Corpora, documents: str) -> None:
    sampler = build_sampler(make_config(documents=documents), replace(twins, weights=(Fraction(3), Fraction(1))))
    for reader in (make_train_reader(twins), load_on_device(twins, CPU)):
        starts = range(0, 8 * sampler.samples_per_batch, sampler.samples_per_batch)
        with open_data_loader(sampler, reader, CPU, starts) as loader:
            taken = [make_batch(loader.next_batch(), -100) for _ in starts]
        for start, batch in zip(starts, taken, strict=True):
            assert batch.domains is not None
            assert batch.domains.dtype == torch.int64
            assert batch.domains.tolist() == sampler.find(start).corpora.tolist()
        assert {group for batch in taken if batch.domains is not None for group in batch.domains.tolist()} == {0, 1}


def test_rows_of_a_single_corpus_name_none(twins: Corpora) -> None:
    alone = Corpora(twins.shards[:1])
    locations = build_sampler(make_config(), alone).find(0)
    for reader in (make_train_reader(alone), load_on_device(alone, CPU)):
        assert make_batch(reader.read(locations), -100).domains is None
    assert ValWindows(alone, 16, 4).read(0, 4).corpora is None


def test_rows_that_are_cut_keep_their_corpus(twins: Corpora) -> None:
    rows = make_train_reader(twins).read(build_sampler(make_config(), twins).find(0))
    assert rows.corpora is not None
    batch = make_batch(rows, -100, width=4)
    assert batch.domains is not None
    assert batch.domains.tolist() == [corpus for corpus in rows.corpora.tolist() for _ in range(4)]
    for row, tokens in enumerate(batch.tokens):
        assert torch.equal(tokens, rows.tokens[row // 4, 4 * (row % 4) : 4 * (row % 4) + 4])


def test_validation_counts_the_windows_of_each_corpus(twins: Corpora) -> None:
    chosen = ValWindows(replace(twins, weights=(Fraction(3), Fraction(1))), 16, 10)
    rows = chosen.read(0, 16)
    assert rows.corpora is not None
    assert rows.lengths is not None
    named = rows.corpora[rows.lengths > 0].tolist()
    assert chosen.counts == [named.count(0), named.count(1)]
    assert sum(chosen.counts) == chosen.num_chosen == 10


def test_recomputed_scores_are_another_order(twins: Corpora) -> None:
    """A run must not resume with them: half of its windows would come twice."""
    scored = replace(twins, score="length")
    before = scored.sha256
    assert before != twins.sha256
    shards = twins.shards[0]
    lengths = score_by_length(shards)
    write_scores(shards.folder, "length", lengths[::-1].copy())
    assert scored.sha256 != before
    write_scores(shards.folder, "length", lengths)
    assert scored.sha256 == before
