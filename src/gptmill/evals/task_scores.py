"""Evaluates a model on a task: examples in, metrics out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptmill.evals.likelihood import LikelihoodScorer, Report
from gptmill.evals.metrics import Measured, measure_groups, measure_metrics
from gptmill.evals.prompts import Example
from gptmill.evals.task import Task


@dataclass(frozen=True)
class TaskScores:
    """The results of a task."""

    task: str
    num_examples: int
    metrics: dict[str, Measured]
    groups: dict[str, dict[str, Measured]]
    num_cropped: int
    """Sequences that were longer than the model's context and lost their beginning."""
    seconds: float


def score_task(
    task: Task,
    examples: Sequence[Example],
    scorer: LikelihoodScorer,
    report: Report = lambda _done, _total: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> TaskScores:
    """All ranks call it with the same examples, and all get the same scores."""
    started = time.monotonic()
    found = scorer.score([request for example in examples for request in example.requests], report, is_stopped)
    metrics, groups = measure_metrics(task, examples, found), measure_groups(task, examples, found)
    return TaskScores(task.name, len(examples), metrics, groups, found.num_cropped, time.monotonic() - started)
