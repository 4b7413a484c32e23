"""Evaluates a model on a task: examples in, metrics out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptmill.evals.likelihood import LikelihoodScorer, Report
from gptmill.evals.metrics import Measured, measure_groups, measure_metrics
from gptmill.evals.prompts import Example, Request
from gptmill.evals.request_encoding import Sequences
from gptmill.evals.task import Task


@dataclass(frozen=True)
class TaskScores:
    """The results of a task."""

    name: str
    num_examples: int
    metrics: dict[str, Measured]
    groups: dict[str, dict[str, Measured]]
    num_cropped: int
    """Sequences that were longer than the model's context and lost their beginning."""
    seconds: float


def list_requests(examples: Sequence[Example]) -> list[Request]:
    return [request for example in examples for request in example.requests]


def score_task(
    task: Task,
    examples: Sequence[Example],
    scorer: LikelihoodScorer,
    report: Report = lambda _done, _total: None,
    is_stopped: Callable[[], bool] = lambda: False,
    sequences: Sequences | None = None,
) -> TaskScores:
    """All ranks call it with the same examples, and all get the same scores.

    `sequences` are the examples' requests, encoded already, for callers that score several models.
    """
    started = time.monotonic()
    if sequences is None:
        found = scorer.score(list_requests(examples), report, is_stopped)
    else:
        found = scorer.score_sequences(sequences, report, is_stopped)
    metrics, groups = measure_metrics(task, examples, found), measure_groups(task, examples, found)
    return TaskScores(task.name, len(examples), metrics, groups, found.num_cropped, time.monotonic() - started)
