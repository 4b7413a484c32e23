"""The data loader: the same rows in the same order, errors that reach the training loop, and no thread left over."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from windows import CONTEXT_LENGTH, make_config, make_reader, make_train_reader, make_windows, prepare

from gptmill.config.errors import UserError
from gptmill.data.batches.data_loader import PREFETCH_BATCHES, DataLoaderStoppedError, open_data_loader
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.on_device import load_on_device
from gptmill.data.batches.order import ShardOrder, Shuffle
from gptmill.data.batches.row_reader import HostReader, RowLocations, Rows
from gptmill.data.batches.samplers import WindowSampler, build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import SplitWindows

CPU = torch.device("cpu")
ONE = MixtureWeights([Fraction(1)])
WINDOWS = make_windows(50)
SAMPLER = WindowSampler([WINDOWS], [Shuffle(50, 1)], ONE, 4)
READER = make_reader(WINDOWS)


def count_loader_threads() -> int:
    return sum(thread.name == "gptmill-data-loader" for thread in threading.enumerate())


@pytest.mark.parametrize(("first", "stride"), [(0, 4), (12, 8), (1000, 4)])
def test_rows_come_in_the_order_of_their_numbers(first: int, stride: int) -> None:
    with open_data_loader(SAMPLER, READER, CPU, count(first, stride)) as loader:
        for step in range(30):
            expected = READER.read(SAMPLER.find(first + step * stride))
            assert torch.equal(loader.next_batch().tokens, expected.tokens)
    assert count_loader_threads() == 0


class SlowReader(HostReader):
    """Counts its reads, and fails in one of them."""

    reads = 0
    fails_at: int | None = None

    def read(self, locations: RowLocations) -> Rows:
        type(self).reads += 1
        if type(self).reads - 1 == self.fails_at:
            raise UserError("the disk is gone")
        return super().read(locations)


def make_slow(fails_at: int | None = None) -> HostReader:
    kind: Any = type("SlowReader", (SlowReader,), {"reads": 0, "fails_at": fails_at})
    return kind(READER.arrays, READER.end_of_text, READER.vocab_size)  # type: ignore[no-any-return]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("prefetch_batches", [1, PREFETCH_BATCHES])
def test_a_loader_prefetches_a_bounded_number_of_batches(prefetch_batches: int) -> None:
    reader: Any = make_slow()
    with open_data_loader(SAMPLER, reader, CPU, count(0, 4), prefetch_batches) as loader:
        wait_until(lambda: type(reader).reads == prefetch_batches)
        loader.next_batch()
        wait_until(lambda: type(reader).reads == prefetch_batches + 1)
    assert type(reader).reads == prefetch_batches + 1


def test_a_loader_without_prefetch_has_no_thread_and_gives_the_same_rows() -> None:
    reader: Any = make_slow()
    with open_data_loader(SAMPLER, reader, CPU, count(8, 4), 0) as loader:
        assert count_loader_threads() == 0
        for step in range(5):
            assert type(reader).reads == step
            assert torch.equal(loader.next_batch().tokens, READER.read(SAMPLER.find(8 + step * 4)).tokens)
    assert loader.waited_seconds > 0


def test_a_read_error_without_a_thread_reaches_the_loop() -> None:
    with open_data_loader(SAMPLER, make_slow(fails_at=1), CPU, count(0, 4), 0) as loader:
        loader.next_batch()
        for _ in range(2):
            with pytest.raises(UserError, match="the disk is gone"):
                loader.next_batch()


def test_a_read_error_reaches_the_loop_after_the_batches_before_it() -> None:
    with open_data_loader(SAMPLER, make_slow(fails_at=2), CPU, count(0, 4)) as loader:
        loader.next_batch()
        loader.next_batch()
        for _ in range(2):
            with pytest.raises(UserError, match="the disk is gone"):
                loader.next_batch()
    assert count_loader_threads() == 0


def test_a_stop_request_ends_the_wait_for_data() -> None:
    arrived = threading.Event()

    class StalledReader(HostReader):
        def read(self, locations: RowLocations) -> Rows:
            arrived.wait(30)
            return super().read(locations)

    reader = StalledReader(READER.arrays, READER.end_of_text, READER.vocab_size)
    with open_data_loader(SAMPLER, reader, CPU, count(0, 4)) as loader:
        with pytest.raises(DataLoaderStoppedError):
            loader.next_batch(lambda: True)
        arrived.set()
        loader.next_batch(lambda: True)  # a batch that is ready is returned


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_an_error_in_the_loop_leaves_no_thread(taken: int) -> None:
    def train() -> None:
        with open_data_loader(SAMPLER, READER, CPU, count(0, 4)) as loader:
            for _ in range(taken):
                loader.next_batch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert count_loader_threads() == 0


def test_the_wait_for_data_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_data_loader(SAMPLER, READER, CPU, count(0, 4)) as loader:
        assert loader.waited_seconds == 0
        clock = iter([10.0, 15.0, 20.0, 20.5])
        monkeypatch.setattr("gptmill.data.batches.data_loader.time.perf_counter", lambda: next(clock))
        loader.next_batch()
        assert loader.waited_seconds == 5.0
        loader.next_batch()
        assert loader.waited_seconds == 5.5
        monkeypatch.undo()


class Remote(tuple[np.ndarray, ...]):
    """Remote shards that record the calls of `prefetch`."""

    calls: list[list[int]]
    fits_in_cache = False

    def prefetch(self, upcoming: list[int]) -> None:
        self.calls.append(upcoming)


def test_upcoming_remote_shards_are_prefetched() -> None:
    tokens = np.arange(CONTEXT_LENGTH * 40, dtype=np.uint16)
    remote = Remote(np.split(tokens, 5))
    remote.calls = []
    counts = np.full(5, (CONTEXT_LENGTH * 8 - 1) // CONTEXT_LENGTH, dtype=np.int64)
    windows = SplitWindows(remote, CONTEXT_LENGTH)
    order = ShardOrder(counts, seed=3)
    sampler = WindowSampler([windows], [order], ONE, 7)
    with open_data_loader(sampler, HostReader([remote], 0, 1 << 16), CPU, count(0, 7)) as loader:
        for _ in range(10):
            loader.next_batch()
    shards = [*order.list_shards(0), *order.list_shards(1), *order.list_shards(2), *order.list_shards(3)]
    assert remote.calls[:10] == [[int(shard) for shard in shards[step : step + 3]] for step in range(10)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder: Path = tmp_path_factory.mktemp("loader")
    texts = [("lorem ipsum " * 30)[: 1 + 13 * number % 200] for number in range(70)]
    one, two = prepare(folder / "one", texts, shard_tokens=900), prepare(folder / "two", texts[::-1], shard_tokens=1111)
    return Corpora((one, two), (Fraction(2), Fraction(1)))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffle", "shards", "sequential"])
@pytest.mark.parametrize("documents", ["packed", "whole"])
@pytest.mark.parametrize("wide", [False, True])
def test_an_on_device_dataset_gives_the_same_rows_bit_for_bit(
    corpora: Corpora, order: str, documents: str, wide: bool
) -> None:
    if documents == "whole" and order != "shuffle":
        return
    if wide:
        corpora = widen(corpora)
    config = make_config(order=order, documents=documents, context_length=32)
    sampler = build_sampler(config, corpora)
    on_device, host = load_on_device(corpora, CPU), make_train_reader(corpora)
    for start in range(0, sampler.samples_per_epoch + 40, sampler.samples_per_batch):
        one, other = on_device.read(sampler.find(start)), host.read(sampler.find(start))
        assert one.tokens.dtype == other.tokens.dtype == torch.int64
        assert torch.equal(one.tokens, other.tokens)
        assert (one.lengths is None) == (other.lengths is None)
        assert one.lengths is None or other.lengths is None or torch.equal(one.lengths, other.lengths)


def widen(corpora: Corpora) -> Corpora:
    """The same tokens in 32 bits, and past the signed half of 16 bits."""
    shards = [
        replace(
            part,
            manifest=replace(part.manifest, dtype="uint32"),
            train=tuple(array.astype(np.uint32) for array in part.train),
        )
        for part in corpora.shards
    ]
    return replace(corpora, shards=tuple(shards))


def test_tokens_in_the_upper_half_of_16_bits_survive(corpora: Corpora) -> None:
    part = corpora.shards[0]
    tokenizer = type("Tokenizer", (), {"end_of_text": 50_256, "vocab_size": 1 << 16})()
    train = (np.arange(30_000, 65_536, 7, dtype=np.uint16),)
    shards = replace(part, train=train, tokenizer=tokenizer)
    reader = load_on_device(Corpora((shards,)), CPU)
    zero = np.zeros(1, dtype=np.int64)
    assert reader.read(RowLocations(zero, zero, zero, len(train[0]))).tokens[0].tolist() == [*train[0].tolist(), 50_256]


def test_an_on_device_dataset_refuses_remote_shards(corpora: Corpora) -> None:
    remote = replace(corpora.shards[0], train=Remote(corpora.shards[0].train))
    with pytest.raises(UserError, match="data_on_device"):
        load_on_device(Corpora((remote,)), CPU)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"order": "shuffle"}, True),
        ({"order": "curriculum"}, True),
        ({"documents": "whole"}, True),
        ({"order": "shards"}, False),
        ({"order": "sequential", "documents": "masked"}, False),
    ],
)
def test_random_access_is_refused_where_shards_are_evicted(
    corpora: Corpora, fields: dict[str, Any], refused: bool
) -> None:
    remote = Corpora((replace(corpora.shards[0], train=Remote(corpora.shards[0].train)),))
    if not refused:
        build_sampler(make_config(**fields), remote)
        return
    with pytest.raises(UserError, match="--order shards"):
        build_sampler(make_config(**fields), remote)
