"""Runs lm-evaluation-harness on a model of ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.run import PrecisionName
from gptmill.evals.harness_library import open_harness
from gptmill.evals.harness_model import HarnessModel
from gptmill.evals.harness_tasks import load_tasks
from gptmill.evals.likelihood import Report
from gptmill.inference.model import Model

BOOTSTRAPS = 1000  # resamples for a standard error that has no formula; the harness' own 100,000 take minutes
FEWSHOT_SEED = 1234  # the harness' default


@dataclass(frozen=True)
class HarnessResults:
    """What lm-evaluation-harness found."""

    metrics: dict[str, dict[str, float]]
    """By task or group, and by the harness' names: METRIC, and METRIC_stderr where there is one."""
    tables: str
    """The harness' own tables, with standard errors, in Markdown."""


def run_harness(
    model: Model,
    names: Sequence[str],
    *,
    task_data: str | None = None,
    limit: int | None = None,
    downloads: bool = False,
    precision: PrecisionName = "auto",
    report: Report = lambda _done, _total: None,
) -> HarnessResults:
    """Evaluates a model on tasks of the harness: by name, group or pattern.

    `task_data` names local files, as for tasks of our own: one file, a folder, or TASK=FILE,TASK=FILE.
    """
    report = _keep_stderr(report)
    with TemporaryDirectory(prefix="gptmill-harness-") as folder, open_harness(downloads=downloads) as lm_eval:
        tasks = load_tasks(lm_eval, names, task_data, Path(folder), downloads=downloads)
        for task in tasks["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        try:
            found = lm_eval.evaluator.evaluate(
                lm=HarnessModel(model, report, precision),
                task_dict=tasks,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
            )
        except ValueError as error:  # a task that runs code, or needs images
            raise UserError(f"lm-evaluation-harness refuses: {' '.join(str(error).split())[:300]}") from error
        tables = [lm_eval.utils.make_table(found)]
        if found.get("groups"):
            tables.append(lm_eval.utils.make_table(found, "groups"))
    return HarnessResults(_read_metrics(found), "\n".join(tables))


def _read_metrics(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of each task and group; the name of a filter is kept where it is not the default one."""
    return {
        name: {
            metric.removesuffix(",none"): float(value)
            for metric, value in values.items()
            if isinstance(value, int | float) and metric not in ("sample_len", "sample_count")
        }
        for name, values in {**found["results"], **found.get("groups", {})}.items()
    }


def _keep_stderr(report: Report) -> Report:
    """The same report, on the standard error of now."""
    stderr = sys.stderr

    def report_there(done: int, total: int) -> None:
        with redirect_stderr(stderr):
            report(done, total)

    return report_there
