"""Metrics on hand-made likelihoods, and their standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gptmill.evals.likelihood import Likelihoods
from gptmill.evals.metrics import measure_groups, measure_metrics
from gptmill.evals.prompts import Example, Request
from gptmill.evals.task import Task, load_task


def make_choices(answer: int, *lengths: int, group: str | None = None) -> Example:
    return Example(tuple(Request("", "") for _ in lengths), answer, lengths, group)


def make_likelihoods(
    logprobs: list[float], tokens: list[int] | None = None, greedy: list[bool] | None = None
) -> Likelihoods:
    count = len(logprobs)
    return Likelihoods(np.array(logprobs), np.array(tokens or [1] * count), np.array(greedy or [False] * count), 0)


def test_the_best_choice_is_the_likeliest_in_all_per_character_or_per_token() -> None:
    examples = [make_choices(0, 2, 10, 4), make_choices(1, 2, 10, 4), make_choices(2, 2, 10, 4)]
    found = make_likelihoods([-2.0, -5.0, -3.0] * 3, [1, 9, 12] * 3)
    metrics = measure_metrics(load_task("hellaswag"), examples, found)
    # In all: -2 is best, choice 0. Per character: -1, -0.5, -0.75: choice 1. Per token: -2, -0.56, -0.25: choice 2.
    assert {name: measured.value for name, measured in metrics.items()} == pytest.approx(dict.fromkeys(metrics, 1 / 3))
    first = measure_metrics(load_task("hellaswag"), examples[:1], make_likelihoods([-2.0, -5.0, -3.0], [1, 9, 12]))
    assert [first[name].value for name in ("acc", "acc_norm", "acc_token_mean")] == [1.0, 0.0, 0.0]
    assert first["acc"].stderr is None


def test_the_standard_error_is_that_of_a_sample() -> None:
    examples = [make_choices(answer, 1, 1) for answer in (0, 0, 0, 1, 0, 1, 0, 0)]
    accuracy = measure_metrics(load_task("winogrande"), examples, make_likelihoods([-1.0, -2.0] * 8))["acc"]
    assert accuracy.value == 0.75
    assert accuracy.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 7))


def test_equal_likelihoods_choose_the_first() -> None:
    metrics = measure_metrics(load_task("boolq"), [make_choices(0, 2, 3)], make_likelihoods([-1.0, -1.0]))
    assert metrics["acc"].value == 1.0


def test_an_empty_choice_has_no_best_character() -> None:
    metrics = measure_metrics(load_task("piqa"), [make_choices(1, 0, 3)], make_likelihoods([-1.0, -2.0]))
    assert metrics["acc_norm"].value == 1.0


def test_the_last_word_must_be_greedy_and_has_a_perplexity() -> None:
    examples = [make_choices(0, 3) for _ in range(4)]
    found = make_likelihoods([-1.0, -2.0, -3.0, -4.0], greedy=[True, False, False, True])
    metrics = measure_metrics(load_task("lambada"), examples, found)
    assert metrics["acc"].value == 0.5
    assert metrics["perplexity"].value == pytest.approx(math.exp(2.5))
    stderr = math.sqrt(5 / 3) / 2
    assert metrics["perplexity"].stderr == pytest.approx(math.exp(2.5) * stderr)


def test_a_hopeless_model_has_a_perplexity_all_the_same() -> None:
    metrics = measure_metrics(load_task("lambada"), [make_choices(0, 3)], make_likelihoods([-1e6]))
    assert metrics["perplexity"].value == pytest.approx(math.exp(700))


def test_groups_weigh_the_same_however_many_examples_they_have() -> None:
    task: Task = load_task("blimp")
    examples = [make_choices(0, 1, 1, group="a")] * 3 + [make_choices(0, 1, 1, group="b")] * 2
    found = make_likelihoods([-1.0, -2.0, -1.0, -2.0, -2.0, -1.0, -2.0, -1.0, -2.0, -1.0])
    groups = measure_groups(task, examples, found)
    assert groups["a"]["acc"].value == pytest.approx(2 / 3)
    assert groups["b"]["acc"].value == 0.0
    accuracy = measure_metrics(task, examples, found)["acc"]
    assert accuracy.value == pytest.approx(1 / 3)
    assert accuracy.stderr == pytest.approx(math.sqrt((2 / 3) * (1 / 3) / 2) / 2)
    assert measure_groups(load_task("piqa"), [make_choices(0, 1, 1)], make_likelihoods([-1.0, -2.0])) == {}
