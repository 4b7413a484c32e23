"""Metrics of tasks: accuracies and perplexity, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptmill.evals.likelihood import Likelihoods
from gptmill.evals.prompts import Example
from gptmill.evals.task import Task


@dataclass(frozen=True)
class Measured:
    """A value and its standard error; None where one example gives none."""

    value: float
    stderr: float | None


Values = NDArray[np.float64]
Measure = Callable[[Sequence[Example], Likelihoods], Values]


def measure_metrics(task: Task, examples: Sequence[Example], found: Likelihoods) -> dict[str, Measured]:
    """The task's metrics over all examples. With groups, each is the mean over the groups, which weigh the same."""
    groups = list_groups(examples)
    values = {name: _measure(task, name, examples, found) for name in task.metrics}
    return {
        name: _average([_summarise(name, own[chosen]) for chosen in groups.values()]) for name, own in values.items()
    }


def measure_groups(task: Task, examples: Sequence[Example], found: Likelihoods) -> dict[str, dict[str, Measured]]:
    """The metrics of each group; empty for a task without groups."""
    if task.group_by is None:
        return {}
    values = {name: _measure(task, name, examples, found) for name in task.metrics}
    return {
        str(group): {name: _summarise(name, own[chosen]) for name, own in values.items()}
        for group, chosen in list_groups(examples).items()
    }


def list_groups(examples: Sequence[Example]) -> dict[str | None, NDArray[np.int64]]:
    """The numbers of each group's examples."""
    groups: dict[str | None, list[int]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(example.group, []).append(number)
    return {group: np.array(numbers) for group, numbers in groups.items()}


def _measure(task: Task, name: str, examples: Sequence[Example], found: Likelihoods) -> Values:
    """The metric of each example, to be averaged."""
    if task.kind == "last_word":
        return found.logprobs if name == "perplexity" else found.is_greedy.astype(np.float64)
    lengths = np.array([length for example in examples for length in example.lengths], dtype=np.float64)
    # The best choice is the likeliest, in all (acc), per character (acc_norm) or per token (acc_token_mean).
    per = {"acc": np.ones_like(lengths), "acc_norm": lengths, "acc_token_mean": found.tokens}[name]
    with np.errstate(divide="ignore"):
        scores = found.logprobs / per
    right, start = [], 0
    for example in examples:
        end = start + len(example.requests)
        right.append(int(np.argmax(scores[start:end])) == example.answer)
        start = end
    return np.array(right, dtype=np.float64)


def _summarise(name: str, values: Values) -> Measured:
    mean = float(values.mean())
    stderr = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    if name != "perplexity":
        return Measured(mean, stderr)
    perplexity = math.exp(min(-mean, 700.0))  # beyond that it is no number any more
    return Measured(perplexity, None if stderr is None else perplexity * stderr)  # to first order


def _average(groups: Sequence[Measured]) -> Measured:
    if len(groups) == 1:
        return groups[0]
    squares = [math.nan if group.stderr is None else group.stderr**2 for group in groups]
    stderr = math.sqrt(sum(squares)) / len(groups)
    return Measured(sum(group.value for group in groups) / len(groups), None if math.isnan(stderr) else stderr)
