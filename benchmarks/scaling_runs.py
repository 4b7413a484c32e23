"""The runs as the scaling law sees them, and which of them it is fitted on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from budget_results import BYTE_VOCAB
from scaling_grid import Cell, find_level

from gptmill.experiments.budget.candidate import choose_dropout, count_weights
from gptmill.experiments.budget.law_fit import MeasuredRun
from gptmill.experiments.budget.scaling_law import find_pressure

NEAR_DROPOUT = 0.09  # to that of a budget
FAR = 1.3  # above the best loss of its compute
FEW_RUNS = 3


def list_measured(results: list[dict[str, Any]]) -> dict[str, list[tuple[str, MeasuredRun]]]:
    """The runs as the law sees them, by name: those to fit, and those of the largest compute, which it should predict.

    Left out are sweeps, runs with another dropout than a budget would choose, and those that are far from the best of
    their compute: a budget would not choose them.
    """
    near = select_near([each for each in results if is_like_budget(each)])
    measured = [make_run(each) for each in near]
    runs = [replace(run, weight=weight) for run, weight in zip(measured, choose_weights(near), strict=True)]
    levels = [find_level(make_cell(each).flops) for each in near]
    return {
        kind: [
            (each["name"], run)
            for each, run, level in zip(near, runs, levels, strict=True)
            if (level == max(levels)) is is_largest
        ]
        for kind, is_largest in (("smaller", False), ("largest", True))
    }


def select_near(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are not far from the best of their corpus with at most twice their compute."""
    flops = {each["name"]: make_cell(each).flops for each in results}

    def find_lowest(like: dict[str, Any]) -> float:
        rivals = (each for each in results if each["corpus"] == like["corpus"])
        return min(each["bits_per_byte"] for each in rivals if flops[each["name"]] <= 2 * flops[like["name"]])

    return [each for each in results if each["bits_per_byte"] < FAR * find_lowest(each)]


def choose_weights(results: list[dict[str, Any]]) -> list[float]:
    """Each corpus, compute and kind of tokenizer counts the same, as long as there are some runs of it."""
    kinds = [
        (each["corpus"], round(math.log(make_cell(each).flops, 4)), each["vocab_size"] == BYTE_VOCAB)
        for each in results
    ]
    counts = Counter(kinds)
    return [1 / max(FEW_RUNS, counts[kind]) for kind in kinds]


def make_cell(result: dict[str, Any]) -> Cell:
    return Cell(**{name: result[name] for name in Cell.__dataclass_fields__ if name in result})


def make_run(result: dict[str, Any]) -> MeasuredRun:
    cell, (trained, unique) = make_cell(result), count_text(result)
    tokens = result["steps"] * result["tokens_per_step"]
    return MeasuredRun(
        cell.shape.block_weights,
        trained,
        unique,
        cell.vocab_size,
        result["density"],
        result["bits_per_byte"],
        find_pressure(count_weights(cell.shape, cell.vocab_size), tokens, result["epoch_tokens"]),
        cell.context_length * result["bytes_per_token"],
    )


def count_text(result: dict[str, Any]) -> tuple[float, float]:
    """The bytes trained on, and those of them that differ."""
    size = result["bytes_per_token"]
    return result["steps"] * result["tokens_per_step"] * size, result["epoch_tokens"] * size


def is_like_budget(result: dict[str, Any]) -> bool:
    """Whether a budget would train the same."""
    cell, tokens = make_cell(result), result["steps"] * result["tokens_per_step"]
    weights, (_, unique) = count_weights(cell.shape, cell.vocab_size), count_text(result)
    usual = choose_dropout(weights, tokens, unique, result["bytes_per_token"])
    return cell.is_usual and abs(cell.dropout - usual) <= NEAR_DROPOUT
