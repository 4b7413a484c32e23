"""The fixed training windows that are evaluated beside the validation windows: the first ones of the run's own order.

Windows from all over a corpus would tell nothing of a run that has seen a part of it: it has not trained on most.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gptmill.config.run import RunConfig
from gptmill.data.batches.row_reader import HostReader, Rows
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora


class TrainWindows:
    """`num_chosen` windows in a fixed order: at most `wanted`, and no more than an epoch has."""

    def __init__(self, config: RunConfig, corpora: Corpora, wanted: int) -> None:
        # Whole documents come in groups; they are evaluated in windows, as the validation split is.
        data = replace(config.data, documents="packed") if config.data.documents == "whole" else config.data
        self._sampler = build_sampler(replace(config, data=data), corpora)
        tokenizer = corpora.tokenizer
        self._reader = HostReader(
            [shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size
        )
        self.context_length = config.model.context_length
        self.num_chosen = max(1, min(wanted, self._sampler.samples_per_epoch))
        self.counts = corpora.mixture.count(self.num_chosen)
        """Windows from each corpus."""

    def read(self, start: int, size: int) -> Rows:
        """Reads windows start … start + size - 1; those past the end get length 0, so that shapes never vary."""
        assert size == self._sampler.samples_per_batch
        found = self._sampler.find(start)
        beyond = np.arange(start, start + size) >= self.num_chosen
        lengths = np.where(beyond, 0, self.context_length).astype(np.int64)
        return self._reader.read(replace(found, lengths=lengths))
