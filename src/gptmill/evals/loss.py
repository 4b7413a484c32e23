"""Validation loss: fixed windows in a fixed order, the same numbers on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gptmill.config.run import RunConfig
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.validation import ValWindows
from gptmill.data.run_corpora import Corpora
from gptmill.models.gpt import GPT
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runs.events import EvalDone
from gptmill.runtime.precision import choose_precision, make_autocast
from gptmill.runtime.world import World


class ValidationLoss:
    """Mean cross-entropy per token, that of each corpus too; across documents only where training goes across."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World) -> None:
        self._world = world
        self._batch_size = config.training.mini_batch_size
        context_length = config.model.context_length
        self._windows = ValWindows(corpora, context_length, config.evaluation.eval_tokens // context_length)
        self._separator = None if config.data.documents == "packed" else corpora.tokenizer.end_of_text
        # The mean of a single corpus is the loss itself.
        self._locations = [shards.location for shards in corpora.shards] if len(corpora.shards) > 1 else []
        self._precision = choose_precision(config.machine.precision, world.device)

    def evaluate(self, model: GPT, step: int, is_stopped: Callable[[], bool] = lambda: False) -> EvalDone:
        started = time.monotonic()
        world, size = self._world, self._batch_size
        sums = torch.zeros(1 + len(self._locations), device=world.device)  # of all, and of each corpus
        # Every rank runs the same number of batches: a rank past the end scores windows that are all ignored.
        for first in range(0, self._windows.num_chosen, size * world.size):
            if is_stopped():
                break  # and still meet the other ranks below, who may not know yet
            rows = self._windows.read(first + world.rank * size, size).to(world.device)
            batch = make_batch(rows, IGNORE_INDEX, self._separator)
            with make_autocast(self._precision, world.device):
                losses = model(batch.tokens, batch.targets, documents_BT=batch.documents, domains_B=batch.groups)
            sums[0] += losses.cross_entropy
            if losses.per_domain_G is not None:
                sums[1:] += losses.per_domain_G
        tokens = self._windows.num_chosen * self._windows.context_length
        total, *by_corpus = world.sum_over_ranks(sums).tolist()
        return EvalDone(step, total / tokens, tokens, time.monotonic() - started, self._make_means(by_corpus))

    def _make_means(self, sums: list[float]) -> dict[str, float]:
        """The mean of each corpus that has windows here; none from a model that was not told to keep groups apart."""
        if not any(sums):
            return {}
        parts = zip(self._locations, sums, self._windows.counts, strict=True)
        return {location: total / (count * self._windows.context_length) for location, total, count in parts if count}
