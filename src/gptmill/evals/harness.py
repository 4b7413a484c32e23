"""Runs lm-evaluation-harness on a model of ours."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gptmill.config.errors import UserError
from gptmill.evals.harness_model import HarnessModel
from gptmill.evals.harness_tasks import import_harness, load_tasks
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
    data: Mapping[str, Path] | None = None,
    limit: int | None = None,
    downloads: bool = False,
    report: Report = lambda _done, _total: None,
) -> HarnessResults:
    """Evaluates a model on tasks of the harness: by name, group or pattern; their data from local files where given."""
    report = _keep_stderr(report)
    with TemporaryDirectory(prefix="gptmill-harness-") as folder, _silence():
        lm_eval = import_harness(downloads=downloads)
        tasks = load_tasks(lm_eval, names, data or {}, Path(folder), downloads=downloads)
        for task in tasks["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        try:
            found = lm_eval.evaluator.evaluate(
                lm=HarnessModel(model, report),
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


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps the harness' bars, prints and warnings from the terminal, and its bootstraps from starting processes."""
    logger = logging.getLogger("lm_eval")
    level, processes = logger.level, os.environ.get("DISABLE_MULTIPROC")
    with ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(redirect_stdout(nothing))
        stack.enter_context(redirect_stderr(nothing))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        os.environ["DISABLE_MULTIPROC"] = "1"
        try:
            yield
        finally:
            logger.setLevel(level)
            if processes is None:
                del os.environ["DISABLE_MULTIPROC"]
