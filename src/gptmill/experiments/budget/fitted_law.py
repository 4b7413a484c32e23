"""The fitted constants, which `benchmarks/scaling.py --write` puts into law.json together with the runs behind them."""

from __future__ import annotations

from importlib import resources
from typing import Any

from gptmill.config.json_text import parse_json
from gptmill.experiments.budget.law_fit import MeasuredRun
from gptmill.experiments.budget.law_residuals import CorrectedLaw, correct_law
from gptmill.experiments.budget.scaling_law import ScalingLaw


def load_law() -> CorrectedLaw:
    """The law that budgets are planned with."""
    content = load_fit()
    return correct_law(ScalingLaw(**content["law"][0]), [MeasuredRun(**run["measured"]) for run in content["runs"]])


def load_fit() -> dict[str, Any]:
    """The content of law.json: the law, the runs that it is fitted to, and the results of all runs."""
    text = (resources.files("gptmill.experiments.budget") / "law.json").read_text(encoding="utf-8")
    content: dict[str, Any] = parse_json(text)
    return content
