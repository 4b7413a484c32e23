"""The fitted constants, which `benchmarks/scaling.py --write` puts into law.json together with the runs behind them."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from gptmill.experiments.budget.scaling_law import ScalingLaw


def load_law() -> ScalingLaw:
    """The law that budgets are planned with."""
    return ScalingLaw(**load_fit()["law"][0])


def load_fit() -> dict[str, Any]:
    """The content of law.json: the law, the runs that it is fitted to, and the results of all runs."""
    text = (resources.files("gptmill.experiments.budget") / "law.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
