"""Evaluation during training: validation loss, tasks and samples. Add a new evaluator to `build_evaluators`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gptmill.config.run import RunConfig
from gptmill.data.run_corpora import Corpora
from gptmill.evals.loss import TrainingLoss, ValidationLoss, has_validation
from gptmill.evals.own_evaluators import OwnEvaluators
from gptmill.evals.samples import Samples
from gptmill.evals.task_evaluator import EncodedTask, TaskEvaluator
from gptmill.models.language_model import LanguageModel
from gptmill.runs.events import Event
from gptmill.runtime.world import World


class Evaluator(Protocol):
    """Evaluates a model on every rank; the loop sets evaluation mode and disables gradients.

    An evaluator that runs on rank 0 only returns None on the others. A slow one polls `is_stopped` and returns early
    once it is true; the result is then discarded.
    """

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool]) -> Event | None: ...


def build_evaluators(
    config: RunConfig, corpora: Corpora, world: World, tasks: Sequence[EncodedTask], last_step: int
) -> list[Evaluator]:
    """The evaluators of a run, in the order in which they run."""
    evaluators: list[Evaluator] = [ValidationLoss(config, corpora, world)] if has_validation(config, corpora) else []
    if config.evaluation.eval_train:
        evaluators.append(TrainingLoss(config, corpora, world))
    if config.evaluation.num_samples and config.evaluation.sample_tokens:
        evaluators.append(Samples(config.evaluation, corpora.tokenizer, world, compiled=config.machine.compile))
    if tasks:
        evaluators.append(TaskEvaluator(tasks, config, corpora.tokenizer, world, last_step))
    if config.evaluation.evaluators is not None:
        evaluators.append(OwnEvaluators(config.evaluation, corpora.tokenizer, world))
    return evaluators


__all__ = ["Evaluator", "build_evaluators"]
