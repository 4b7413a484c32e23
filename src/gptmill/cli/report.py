"""gptmill report: writes what a run did as a page, Markdown or JSON."""

from __future__ import annotations

import sys

from gptmill.cli.flags import Command
from gptmill.cli.output import print_line
from gptmill.config.report_request import ReportRequest
from gptmill.config.schema import build_config

MAX_RUNS = 50
SUMMARY = """\
Writes a report from a run's events.jsonl: loss, phases, timeline, speed and what bounds it, samples, incidents, cost
and configuration. Of several runs, it compares curves, results and options. RUN is the name of a run, the path of
its folder or of its events.jsonl."""


def run(arguments: list[str]) -> int:
    command = Command("report", "RUN [RUN ...]", SUMMARY, (ReportRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, MAX_RUNS)
    request = build_config(ReportRequest, parsed.values)
    from gptmill.api.reporting import write_report

    report = write_report(parsed.words, request)
    if report.path is None:
        sys.stdout.write(report.text)
    else:
        print_line(f"report: {report.path}")
    return 0
