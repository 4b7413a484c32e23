"""Tasks during training: scored in batches on all ranks, without touching what training has compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.tokenizers import Tokenizer
from gptmill.evals.likelihood import BATCH_TOKENS, LikelihoodScorer
from gptmill.evals.metrics import Measured, measure_metrics
from gptmill.evals.prompts import Example
from gptmill.evals.request_encoding import Sequences, encode_requests
from gptmill.evals.task import Task, load_tasks
from gptmill.evals.task_data import load_examples
from gptmill.models.language_model import LanguageModel
from gptmill.runs.events import ScoresDone
from gptmill.runtime.world import World

FOUNDING_METRIC = "acc_token_mean"  # what `250 hellaswag 0.2340` in log.txt has always meant


@dataclass(frozen=True)
class EncodedTask:
    """A task with its examples, tokenized once for all evaluations."""

    task: Task
    examples: list[Example]
    sequences: Sequences


def load_eval_tasks(config: RunConfig, tokenizer: Tokenizer) -> list[EncodedTask]:
    """The tasks that run during training; raises UserError if one is unknown or its data is missing or damaged."""
    evaluation = config.evaluation
    if evaluation.eval_tasks is None:
        return []
    try:
        loaded = []
        for task in load_tasks(evaluation.eval_tasks):
            examples = load_examples(task, evaluation.eval_task_data, evaluation.eval_task_limit)
            requests = [request for example in examples for request in example.requests]
            sequences = encode_requests(tokenizer, requests, config.model.context_length)
            loaded.append(EncodedTask(task, examples, sequences))
    except UserError as error:
        raise UserError(f"eval_tasks = {evaluation.eval_tasks}: {_rename_options(str(error))}") from None
    names = [encoded.task.name for encoded in loaded]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"eval_tasks = {evaluation.eval_tasks}: two tasks are named {min(twice)}; rename one file")
    return loaded


def _rename_options(message: str) -> str:
    """A message of gptmill eval in terms of training, which downloads nothing."""
    message = message.replace(" let gptmill do so: add --download; or", "")
    return message.replace("--task_data", "--eval_task_data")


def describe_cropped(tasks: Sequence[EncodedTask], context_length: int) -> str:
    """Which tasks have texts that do not fit into the context; empty for none."""
    parts = [
        f"{encoded.sequences.num_cropped:,} of {len(encoded.sequences.ids):,} texts of {encoded.task.name}"
        for encoded in tasks
        if encoded.sequences.num_cropped
    ]
    return f"{', '.join(parts)} exceed context_length {context_length:,} and lose their beginning" if parts else ""


class TaskEvaluator:
    """Scores the model on the tasks at every evaluation, or at every `eval_task_freq` steps and at the end.

    All ranks share the batches, and get the same scores as a single one.
    """

    def __init__(
        self, tasks: Sequence[EncodedTask], config: RunConfig, tokenizer: Tokenizer, world: World, last_step: int
    ) -> None:
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._world = world
        self._freq = config.evaluation.eval_task_freq or 1
        self._last_step = last_step
        self._precision = config.machine.precision
        self._is_compiled = config.machine.compile
        # No more tokens than a micro-batch, whose activations fit into memory.
        kind = "cuda" if world.device.type == "cuda" else "cpu"
        micro_batch = config.training.mini_batch_size * config.model.context_length
        self._batch_tokens = min(BATCH_TOKENS[kind], micro_batch)

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool]) -> ScoresDone | None:
        if step % self._freq != 0 and step < self._last_step:
            return None
        started, scores = time.monotonic(), dict[str, float]()
        scorer = LikelihoodScorer(
            model, self._tokenizer, self._world, precision=self._precision, batch_tokens=self._batch_tokens
        )
        # In eager mode: other shapes would make torch.compile replace training's graphs by ones for any shape.
        with torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext():
            for encoded in self._tasks:
                # Once stopped, it still joins the other ranks' collectives, and the loop discards the scores.
                found = scorer.score_sequences(encoded.sequences, is_stopped=is_stopped)
                scores |= name_scores(encoded.task, measure_metrics(encoded.task, encoded.examples, found))
        return ScoresDone(step, scores, time.monotonic() - started)


def name_scores(task: Task, metrics: Mapping[str, Measured]) -> dict[str, float]:
    """The founding metric, or else the task's first, under the task's name; the others as TASK/METRIC."""
    main = FOUNDING_METRIC if FOUNDING_METRIC in metrics else task.metrics[0]
    ordered = [main, *(name for name in metrics if name != main)]
    return {task.name if name == main else f"{task.name}/{name}": metrics[name].value for name in ordered}
