"""Validation loss: fixed windows in a fixed order, the same numbers on any number of ranks."""

from __future__ import annotations

import time

import torch

from gptmill.config.run import RunConfig
from gptmill.data.batches import read_val_batch
from gptmill.data.shards import TokenShards
from gptmill.models.gpt import GPT, IGNORED_TARGET
from gptmill.runs.events import EvalDone
from gptmill.runtime.precision import choose_precision, make_autocast
from gptmill.runtime.world import World


class ValidationLoss:
    """Mean cross-entropy per token, without label smoothing."""

    def __init__(self, config: RunConfig, shards: TokenShards, world: World) -> None:
        self._world = world
        self._batch_size = config.training.mini_batch_size
        self._windows = shards.cut(shards.val, config.model.context_length)
        wanted = config.evaluation.eval_tokens // config.model.context_length
        self._num_chosen = min(wanted, self._windows.num_windows)
        self._precision = choose_precision(config.machine.precision, world.device)

    def evaluate(self, model: GPT, step: int) -> EvalDone:
        started = time.monotonic()
        world, size = self._world, self._batch_size
        total = torch.zeros((), device=world.device)
        # Every rank runs the same number of batches: a rank past the end scores windows that are all ignored.
        for first in range(0, self._num_chosen, size * world.size):
            start = first + world.rank * size
            batch = read_val_batch(self._windows, self._num_chosen, start, size, IGNORED_TARGET).to(world.device)
            with make_autocast(self._precision, world.device):
                total += model(batch.tokens, batch.targets)
        tokens = self._num_chosen * self._windows.context_length
        loss = world.sum_over_ranks(total).item() / tokens
        return EvalDone(step, loss, tokens, time.monotonic() - started)
