"""Validation loss: fixed windows in a fixed order, the same numbers on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gptmill.config.run import RunConfig
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.validation import ValWindows
from gptmill.data.corpora import Corpora
from gptmill.models.gpt import GPT, IGNORED_TARGET
from gptmill.runs.events import EvalDone
from gptmill.runtime.precision import choose_precision, make_autocast
from gptmill.runtime.world import World


class ValidationLoss:
    """Mean cross-entropy per token, without label smoothing; across documents only where training goes across."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World) -> None:
        self._world = world
        self._batch_size = config.training.mini_batch_size
        context_length = config.model.context_length
        self._windows = ValWindows(corpora, context_length, config.evaluation.eval_tokens // context_length)
        self._separator = None if config.data.documents == "packed" else corpora.tokenizer.end_of_text
        self._precision = choose_precision(config.machine.precision, world.device)

    def evaluate(self, model: GPT, step: int, is_stopped: Callable[[], bool] = lambda: False) -> EvalDone:
        started = time.monotonic()
        world, size = self._world, self._batch_size
        total = torch.zeros((), device=world.device)
        # Every rank runs the same number of batches: a rank past the end scores windows that are all ignored.
        for first in range(0, self._windows.num_chosen, size * world.size):
            if is_stopped():
                break  # and still meet the other ranks below, who may not know yet
            rows = self._windows.read(first + world.rank * size, size).to(world.device)
            batch = make_batch(rows, IGNORED_TARGET, self._separator)
            with make_autocast(self._precision, world.device):
                total += model(batch.tokens, batch.targets, documents_BT=batch.documents)
        tokens = self._windows.num_chosen * self._windows.context_length
        loss = world.sum_over_ranks(total).item() / tokens
        return EvalDone(step, loss, tokens, time.monotonic() - started)
