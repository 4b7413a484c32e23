"""gptmill doctor: tries out what training needs of this machine, and says how to fix what fails."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.cli.output import print_line
from gptmill.config import exit_codes
from gptmill.config.doctor_request import DoctorRequest
from gptmill.config.schema import build_config

if TYPE_CHECKING:
    from gptmill.experiments.doctor.finding import Finding

SUMMARY = """\
Tries out what training needs of this machine: torch, driver, GPUs, each precision and attention backend, torch.compile,
handshakes between processes, disk, memory, tokenizer and extras. Shows what each result means and the line that fixes
it. The exit code is 0 if training will work and 1 if not; warnings do not count."""
SIGNS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "–"}
PLAIN_SIGNS = {"ok": "ok", "warning": "!", "failed": "X", "skipped": "-"}
MAX_WIDTH = 140


def run(arguments: list[str]) -> int:
    command = Command("doctor", "", SUMMARY, (DoctorRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 0, 0)
    request = build_config(DoctorRequest, parsed.values)
    from gptmill.api.doctor import run_doctor
    from gptmill.experiments.doctor.finding import can_train

    findings = run_doctor(request)
    is_ready = can_train(findings)
    if request.json:
        report = {"can_train": is_ready, "findings": [asdict(finding) for finding in findings]}
        print_line(json.dumps(report, indent=2))
    else:
        for line in make_table(findings, shutil.get_terminal_size((100, 0)).columns):
            print_line(line)
    return 0 if is_ready else exit_codes.FAILED


def make_table(findings: list[Finding], width: int) -> list[str]:
    """The findings by group, each with its meaning and its fix below it, and a sentence at the end."""
    signs = SIGNS if can_print("".join(SIGNS.values())) else PLAIN_SIGNS
    column = max(len(finding.name) for finding in findings) + 2
    lines, group = [], ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            lines += ["", group]
        start = f"  {signs[finding.state]:<3}{finding.name:<{column}}"
        lines += wrap(start, finding.what, width)
        below = " " * len(start)
        if finding.meaning:
            lines += wrap(below, finding.meaning, width)
        if finding.fix and finding.state != "ok":
            lines += wrap(below, f"fix: {finding.fix}", width)
    return [*lines[1:], "", describe_result(findings)]


def wrap(start: str, text: str, width: int) -> list[str]:
    """The text behind its start, wrapped and indented; commands with long addresses stay whole."""
    width = max(40 + len(start), min(width, MAX_WIDTH))
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=" " * len(start),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def describe_result(findings: list[Finding]) -> str:
    failed = [finding.name for finding in findings if finding.state == "failed"]
    warnings = sum(finding.state == "warning" for finding in findings)
    if failed:
        return f"Training will not work here: {', '.join(failed)}."
    return "Training will work here" + (f"; {warnings} warning{'s' * (warnings > 1)}." if warnings else ".")


def can_print(text: str) -> bool:
    """Whether the terminal's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
