"""Compares runs: their configs, and their losses at the steps that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptmill.config.recipes import read_saved_config
from gptmill.config.schema import list_values
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, StepLogged
from gptmill.runs.run_summary import RunSummary, summarize_run

MAX_ROWS = 12
NAMES = ("run_name", "logdir")


@dataclass(frozen=True)
class RunComparison:
    """Two or more runs side by side."""

    summaries: list[RunSummary]
    config: dict[str, list[Any]]
    """The options that differ, with the value of each run; None where a run has no such option."""
    loss_kind: str
    """validation, or training if the runs were never evaluated at the same step."""
    losses: list[tuple[int, list[float]]]
    """The loss of each run at common steps, spread evenly from the first to the last."""


def compare_runs(runs: list[RunDirectory]) -> RunComparison:
    """Raises UserError if the config of a run cannot be read."""
    configs = [list_values(read_saved_config(run.config)) for run in runs]
    kind, losses = _find_common_losses(runs)
    return RunComparison([summarize_run(run) for run in runs], find_differences(configs), kind, losses)


def find_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the options that differ, with the value of each config; None where one has no such option."""
    options = dict.fromkeys(name for config in configs for name in config if name not in NAMES)
    values = {name: [config.get(name) for config in configs] for name in options}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _find_common_losses(runs: list[RunDirectory]) -> tuple[str, list[tuple[int, list[float]]]]:
    logs = [read_events(run.events, missing_ok=True) for run in runs]
    evaluated = [{event.step: event.val_loss for event in log if isinstance(event, EvalDone)} for log in logs]
    if common := _intersect(evaluated):
        return "validation", common
    trained = [{event.step: event.loss for event in log if isinstance(event, StepLogged)} for log in logs]
    return "training", _intersect(trained)


def _intersect(losses: list[dict[int, float]]) -> list[tuple[int, list[float]]]:
    shared = set.intersection(*(set(by_step) for by_step in losses))
    steps = sorted(step for step in shared if all(math.isfinite(by_step[step]) for by_step in losses))
    if len(steps) > MAX_ROWS:
        steps = [steps[round(row * (len(steps) - 1) / (MAX_ROWS - 1))] for row in range(MAX_ROWS)]
    return [(step, [by_step[step] for by_step in losses]) for step in steps]
