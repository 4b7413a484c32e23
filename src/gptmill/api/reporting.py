"""report: what a run did, as a page, Markdown or JSON, as a function call."""

from __future__ import annotations

import os
from typing import Any

from gptmill.api.configuration import Recipe
from gptmill.api.progress import show_amount
from gptmill.api.run import Run
from gptmill.config.errors import UserError
from gptmill.config.keywords import build_request
from gptmill.config.report_request import ReportFormat, ReportRequest
from gptmill.runs.reporting.writing import Report, make_report


def report(*runs: Run | Recipe, format: ReportFormat = "html", out: Recipe | None = None, **options: Any) -> Report:
    """Reports a run, or compares several; `text` of the result is the report, `path` the file that it is in.

    The options are those of gptmill report; by default, html is written to RUN/report.html and the others to no file.
    """
    if not runs:
        raise UserError("report needs a run: its name, its folder or a Run")
    given = {"format": format, "out": out, **options}
    request = build_request(ReportRequest, {name: value for name, value in given.items() if value is not None})
    return write_report([os.fspath(run.path if isinstance(run, Run) else run) for run in runs], request)


def write_report(names: list[str], request: ReportRequest) -> Report:
    """Shows how far it is while it reads long logs."""
    with show_amount("reading events") as show:
        return make_report(names, request, show)
