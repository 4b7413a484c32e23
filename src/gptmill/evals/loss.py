"""Loss over a fixed set of windows of the validation or the training split, the same on any number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.row_reader import Rows
from gptmill.data.batches.training_windows import TrainWindows
from gptmill.data.batches.validation_windows import ValWindows, find_unvalidated
from gptmill.data.run_corpora import Corpora
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runs.events import EvalDone, TrainEvalDone
from gptmill.runtime.precision import choose_precision, make_autocast
from gptmill.runtime.world import World

COMPILE_FROM_BATCHES = 100  # in the whole run: to compile the model without gradients takes 8 s on an H200


def has_validation(config: RunConfig, corpora: Corpora) -> bool:
    """Whether any corpus has validation windows."""
    return len(find_unvalidated(corpora, config.model.context_length)) < len(corpora.shards)


def check_validation(config: RunConfig, corpora: Corpora) -> str:
    """What the validation loss leaves out; empty for nothing. Raises UserError for early stopping without it."""
    window = config.model.context_length + 1
    missing = find_unvalidated(corpora, config.model.context_length)
    if not missing:
        return ""
    parts = ", ".join(f"{name} has {tokens:,}" for name, tokens in missing.items())
    reason = f"a window of context_length + 1 = {window:,} tokens does not fit into the validation split ({parts})"
    if has_validation(config, corpora):
        return f"the validation loss leaves out {', '.join(missing)}: {reason}"
    if config.guard.early_stop_patience is not None:
        raise UserError(
            f"early_stop_patience = {config.guard.early_stop_patience}: there is no validation loss, since {reason}; "
            f"leave it out, or prepare the corpus with a larger --val_fraction"
        )
    return f"no validation loss and no best_model: {reason}"


class ValidationLoss:
    """The loss on the validation split."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World) -> None:
        windows = ValWindows(corpora, config.model.context_length, count_windows(config))
        self._mean_loss = _MeanLoss(config, corpora, world, windows)

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool] = lambda: False) -> EvalDone:
        return EvalDone(step, *self._mean_loss.compute(model, is_stopped))


class TrainingLoss:
    """The loss on the first windows that the run trains on, computed as the validation loss is."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World) -> None:
        windows = TrainWindows(config, corpora, count_windows(config))
        self._mean_loss = _MeanLoss(config, corpora, world, windows)

    def evaluate(
        self, model: LanguageModel, step: int, is_stopped: Callable[[], bool] = lambda: False
    ) -> TrainEvalDone:
        return TrainEvalDone(step, *self._mean_loss.compute(model, is_stopped))


def count_windows(config: RunConfig) -> int:
    return config.evaluation.eval_tokens // config.model.context_length


def count_evaluations(config: RunConfig) -> float:
    """Those of the whole run, at the start and at the end included; infinite if its steps are not known yet."""
    steps = config.training.max_steps
    return math.inf if steps is None else 2 + steps // config.evaluation.eval_freq


class _Windows(Protocol):
    """`num_chosen` windows in a fixed order."""

    context_length: int
    num_chosen: int
    counts: list[int]
    """Windows from each corpus."""

    def read(self, start: int, size: int) -> Rows: ...


class _Result(NamedTuple):
    loss: float
    tokens: int
    seconds: float
    by_corpus: dict[str, float]


class _MeanLoss:
    """Mean cross-entropy per token, overall and per corpus; masked at document boundaries unless packed."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World, windows: _Windows) -> None:
        self._world = world
        self._batch_size = config.training.mini_batch_size
        self._windows = windows
        self._separator = None if config.data.documents == "packed" else corpora.tokenizer.end_of_text
        # With a single corpus, its loss is the overall loss.
        self._locations = [shards.location for shards in corpora.shards] if len(corpora.shards) > 1 else []
        self._precision = choose_precision(config.machine.precision, world.device)
        num_batches = -(-windows.num_chosen // (self._batch_size * world.data_size))
        self._is_eager = config.machine.compile and num_batches * count_evaluations(config) < COMPILE_FROM_BATCHES

    def compute(self, model: LanguageModel, is_stopped: Callable[[], bool]) -> _Result:
        with torch.compiler.set_stance("force_eager") if self._is_eager else nullcontext():
            return self._compute(model, is_stopped)

    def _compute(self, model: LanguageModel, is_stopped: Callable[[], bool]) -> _Result:
        started = time.monotonic()
        world, size = self._world, self._batch_size
        starts = range(0, self._windows.num_chosen, size * world.data_size)
        # A row for every batch of every rank, each with the overall loss, then that per corpus. The sum over the ranks
        # is exact: all other summands are 0.
        sums = torch.zeros(len(starts) * world.data_size, 1 + len(self._locations), device=world.device)
        # Every rank runs the same number of batches: past the end, it evaluates windows whose targets are ignored.
        for first in starts:
            if is_stopped():
                break  # but still join the all-reduce below, since other ranks may not have been stopped
            start = first + world.data_rank * size
            rows = self._windows.read(start, size).to(world.device)
            batch = make_batch(rows, IGNORE_INDEX, self._separator)
            with make_autocast(self._precision, world.device):
                losses = model(batch.tokens, batch.targets, documents_BT=batch.documents, domains_B=batch.domains)
            sums[start // size, 0] = losses.cross_entropy.detach()
            if losses.per_domain_G is not None:
                sums[start // size, 1:] = losses.per_domain_G
        tokens = self._windows.num_chosen * self._windows.context_length
        # One after the other, in the order of the windows: the same rounding on any number of ranks.
        total, *by_corpus = np.add.accumulate(world.sum_over_data(sums).cpu().numpy())[-1].tolist()
        return _Result(total / tokens, tokens, time.monotonic() - started, self._make_means(by_corpus))

    def _make_means(self, sums: list[float]) -> dict[str, float]:
        """The mean loss of each corpus with windows; empty if the model computes no per-domain loss."""
        if not any(sums):
            return {}
        parts = zip(self._locations, sums, self._windows.counts, strict=True)
        return {location: total / (count * self._windows.context_length) for location, total, count in parts if count}
