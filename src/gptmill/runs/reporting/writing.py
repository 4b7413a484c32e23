"""Writes reports: from runs to a text, and to a file that appears at once or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.report_request import ReportFormat, ReportRequest
from gptmill.data.files import write_durably
from gptmill.runs.directory import RunDirectory
from gptmill.runs.reporting import html_page, json_report, markdown_page
from gptmill.runs.reporting.content import describe_run
from gptmill.runs.reporting.differences import describe_several
from gptmill.runs.reporting.facts import ReportReading, RunFacts, collect_facts, find_reported

STDOUT = "-"
MARKERS = (html_page.MARKER, markdown_page.MARKER, json_report.MARKER)
MARKER_BYTES = 1000
NAME = "report.html"


@dataclass(frozen=True)
class Report:
    """A report, and the file that it was written to."""

    text: str
    path: Path | None
    """None if it was not written to a file."""


def make_report(names: Sequence[str], request: ReportRequest, report: ReportReading | None = None) -> Report:
    """Reports one run, or compares several; raises UserError for what cannot be read or must not be overwritten."""
    if request.price_per_hour is not None and request.price_per_hour < 0:
        raise UserError(f"--price_per_hour {request.price_per_hour:g} is negative; give dollars per device and hour")
    runs = [find_reported(name, request.logdir) for name in names]
    path = _choose_path(runs, request)
    if path is not None:
        _check_target(path)
    facts = [collect_facts(run, request.price_per_hour, report) for run in runs]
    text = render(facts, request.format, is_log=request.axes == "log")
    if path is not None:
        write_durably(path, text)
    return Report(text, path)


def render(facts: Sequence[RunFacts], to: ReportFormat, *, is_log: bool = False) -> str:
    """Returns the report of one run, or the comparison of several."""
    if to == "json":
        return json_report.render_json(facts)
    document = describe_run(facts[0], is_log=is_log) if len(facts) == 1 else describe_several(facts, is_log=is_log)
    return html_page.render_html(document) if to == "html" else markdown_page.render_markdown(document)


def _choose_path(runs: Sequence[RunDirectory], request: ReportRequest) -> Path | None:
    """Returns where to write; None for standard output."""
    if request.out is not None:
        return None if request.out == STDOUT else Path(request.out)
    if request.format != "html":
        return None
    return runs[0].path / NAME if len(runs) == 1 else Path(NAME)


def _check_target(path: Path) -> None:
    """Raises UserError unless the file is new or an earlier report."""
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: folder {path.parent} does not exist; create it or choose another one")
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"--out {path} is not a regular file; choose another one, or --out - for standard output")
    with path.open("rb") as file:
        beginning = file.read(MARKER_BYTES).decode(errors="replace")
    if beginning and not any(marker in beginning for marker in MARKERS):
        raise UserError(f"{path} exists and is not a gptmill report; move it away, or choose another file with --out")
