"""How far the law's pick is behind the best of runs that had the same time, or took the same compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from scaling_grid import LEVELS
from scaling_runs import make_cell

from gptmill.experiments.budget.law_fit import MeasuredRun, list_errors, predict_run
from gptmill.experiments.budget.law_residuals import correct_law
from gptmill.experiments.budget.scaling_law import ScalingLaw

SAME_COMPUTE = 0.08  # in its logarithm


def print_picks(law: ScalingLaw, runs: Mapping[str, MeasuredRun], results: Mapping[str, dict[str, Any]]) -> None:
    """For each situation: by the law alone, and as corrected by all runs but those of the situation."""
    print("\n| same time or compute | runs | the law's pick is above the best by | the corrected law's by |")
    print("|---|---:|---:|---:|")
    rows, errors = [], []
    for situation, names in group_rivals(runs, results).items():
        corrected = correct_law(law, [run for name, run in runs.items() if name not in names])
        rivals = [runs[name] for name in names]
        errors += zip(*(map(abs, list_errors(each, rivals)) for each in (law, corrected)), strict=True)
        if len(rivals) > 1:
            rows.append((measure_excess(law, rivals), measure_excess(corrected, rivals)))
            print(f"| {situation} | {len(names)} | {rows[-1][0]:.2%} | {rows[-1][1]:.2%} |")
    for label, values in ((f"mean of {len(rows)}", rows), (f"mean absolute error of {len(errors)} runs", errors)):
        alone, corrected_ones = map(fmean, zip(*values, strict=True))
        print(f"| {label} | | {alone:.2%} | {corrected_ones:.2%} |")
    alone, corrected_ones = map(max, zip(*rows, strict=True))
    print(f"| most of {len(rows)} | | {alone:.2%} | {corrected_ones:.2%} |")


def measure_excess(law: ScalingLaw, rivals: list[MeasuredRun]) -> float:
    """By how much the run that the law prefers is above the best."""
    pick = min(rivals, key=lambda run: predict_run(law, run))
    return pick.bits_per_byte / min(run.bits_per_byte for run in rivals) - 1


def group_rivals(runs: Mapping[str, MeasuredRun], results: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the runs that one could have had instead of each other; of some there is but one."""
    groups: dict[str, list[str]] = {}
    for name in runs:
        groups.setdefault(find_situation(results[name]), []).append(name)
    return groups


def find_situation(result: dict[str, Any]) -> str:
    """The machine, corpus and budget, or the grid's corpus and compute, or a run that has no like."""
    if "situation" in result:
        return str(result["situation"])
    flops = make_cell(result).flops
    level = next((level for level in LEVELS if abs(math.log(flops / level)) < SAME_COMPUTE), None)
    return f"grid-{result['corpus']}-{level:.2g}" if level else str(result["name"])
