"""Samplers: map sample numbers to row locations by pure arithmetic, without reading tokens.

A sample is a window, or a group of whole documents. A sampler's whole state is the number of samples read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.run import DataConfig, RunConfig
from gptmill.data.batches.curriculum import Curriculum, score_windows
from gptmill.data.batches.document_groups import DocumentGroups, cut_documents
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.order import Order, ShardOrder, Shuffle
from gptmill.data.batches.row_reader import RowLocations
from gptmill.data.batches.window_offset import WindowOffset
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import SplitWindows, TokenShards
from gptmill.data.shards.scores import read_scores

PREFETCH_SHARDS = 3


class Sampler(Protocol):
    """The training samples of a run, in order. An epoch has as many samples as all corpora together."""

    samples_per_epoch: int
    samples_per_batch: int

    def find(self, start: int) -> RowLocations:
        """Returns the rows of the micro-batch that starts with sample `start`."""
        ...

    def count_targets(self, start: int, size: int) -> int:
        """Returns the number of targets in samples start … start + size - 1, without padding."""
        ...

    def list_next_shards(self, start: int) -> list[list[int]]:
        """Returns for each corpus the shards read next from sample `start` on; empty if the order spans all shards."""
        ...


class WindowSampler:
    """Samples windows in a given order; several corpora are mixed by weight."""

    def __init__(
        self,
        windows: list[SplitWindows],
        orders: list[Order],
        mixture: MixtureWeights,
        batch_size: int,
        offsets: list[WindowOffset] | None = None,
    ) -> None:
        self.samples_per_epoch = sum(part.num_windows for part in windows)
        self.samples_per_batch = batch_size
        self._windows, self._orders, self._mixture, self._offsets = windows, orders, mixture, offsets
        self._context_length = windows[0].context_length

    def find(self, start: int) -> RowLocations:
        corpora, numbers = self._mixture.assign(start, self.samples_per_batch)
        shards, starts = np.empty_like(numbers), np.empty_like(numbers)
        for corpus in np.unique(corpora):
            mask = corpora == corpus
            found = self._orders[corpus].find(numbers[mask])
            shards[mask], starts[mask] = self._windows[corpus].locate(found)
            if self._offsets is not None:
                starts[mask] = self._offsets[corpus].apply(shards[mask], starts[mask], numbers[mask])
        return RowLocations(corpora, shards, starts, self._context_length)

    def count_targets(self, start: int, size: int) -> int:  # noqa: ARG002
        return size * self._context_length

    def list_next_shards(self, start: int) -> list[list[int]]:
        counts = self._mixture.count(start)
        return [
            order.list_next_shards(number, PREFETCH_SHARDS) if isinstance(order, ShardOrder) else []
            for order, number in zip(self._orders, counts, strict=True)
        ]


class DocumentSampler:
    """Samples groups of whole documents; a group is a micro-batch from a single corpus."""

    samples_per_batch = 1

    def __init__(self, groups: list[DocumentGroups], mixture: MixtureWeights) -> None:
        self.samples_per_epoch = sum(part.num_groups for part in groups)
        self._groups, self._mixture = groups, mixture

    def find(self, start: int) -> RowLocations:
        (corpus,), (number,) = self._mixture.assign(start, 1)
        pieces, width, rows = self._groups[corpus].find(int(number))
        table = self._groups[corpus].pieces
        shards, starts, lengths = np.zeros((3, rows), dtype=np.int64)
        shards[: len(pieces)], starts[: len(pieces)] = table.shards[pieces], table.starts[pieces]
        lengths[: len(pieces)] = table.lengths[pieces]
        return RowLocations(np.full(rows, corpus), shards, starts, width, lengths)

    def count_targets(self, start: int, size: int) -> int:
        total = 0
        for corpus, number in zip(*self._mixture.assign(start, size), strict=True):
            pieces, _, _ = self._groups[corpus].find(int(number))
            total += int(self._groups[corpus].pieces.lengths[pieces].sum())
        return total

    def list_next_shards(self, start: int) -> list[list[int]]:  # noqa: ARG002
        return [[] for _ in self._groups]


def build_sampler(config: RunConfig, corpora: Corpora) -> Sampler:
    """Builds the sampler that the config asks for; raises UserError if the data does not allow it."""
    data, seed, context_length = config.data, config.training.seed, config.model.context_length
    for shards in corpora.shards:
        _check_long_enough(shards, shards.cut(shards.train, context_length))
        _check_random_access(shards, data)
    if data.documents == "whole":
        max_tokens = config.training.mini_batch_size * context_length
        groups = []
        for corpus, shards in enumerate(corpora.shards):
            sizes = shards.cut(shards.train, context_length).lengths
            pieces = cut_documents(sizes, shards.train_starts, context_length)
            groups.append(DocumentGroups(pieces, context_length, max_tokens, seed, corpus))
        return DocumentSampler(groups, corpora.mixture)
    windows = [shards.cut(shards.train, context_length) for shards in corpora.shards]
    orders = [
        _build_order(data, seed, corpus, shards, part)
        for corpus, (shards, part) in enumerate(zip(corpora.shards, windows, strict=True))
    ]
    offsets = [WindowOffset(part, seed, corpus) for corpus, part in enumerate(windows)] if data.shift_windows else None
    return WindowSampler(windows, orders, corpora.mixture, config.training.mini_batch_size, offsets)


def _build_order(data: DataConfig, seed: int, corpus: int, shards: TokenShards, windows: SplitWindows) -> Order:
    if data.order == "shards":
        return ShardOrder(windows.counts, seed, corpus)
    if data.order == "sequential":
        return ShardOrder(windows.counts)
    if data.order == "curriculum":
        scores = score_windows(windows, shards.train_starts, read_scores(shards, data.score))
        return Curriculum(scores, seed, corpus)
    return Shuffle(windows.num_windows, seed, corpus)


def _check_long_enough(shards: TokenShards, windows: SplitWindows) -> None:
    if windows.num_windows == 0:
        longest = windows.lengths.max(initial=0)
        raise UserError(
            f"the train split of {shards.location} has {longest:,} tokens, less than one window of context_length + 1 "
            f"= {windows.context_length + 1:,}; use more text or a smaller --context_length"
        )


def _check_random_access(shards: TokenShards, data: DataConfig) -> None:
    """Raises UserError if the order needs random access to shards that a cache evicts."""
    needs_random_access = data.documents == "whole" or data.order in ("shuffle", "curriculum")
    if needs_random_access and not getattr(shards.train, "fits_in_cache", True):
        raise UserError(
            f"the shards of {shards.location} do not all fit in the cache, and this order reads them at random; use "
            f"--order shards with packed or masked documents, or a larger --cache_gb"
        )
