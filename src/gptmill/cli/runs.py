"""gptmill runs: lists, compares and removes runs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gptmill.cli.checkpoints import format_age
from gptmill.cli.flags import Command
from gptmill.cli.output import format_table
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.requests import RunsRequest
from gptmill.config.schema import build_config
from gptmill.runs.reporting.formatting import format_amount

if TYPE_CHECKING:
    from gptmill.runs.directory import RunDirectory
    from gptmill.runs.run_summary import RunSummary

FORMS = "list | compare RUN RUN [RUN ...] | remove RUN [RUN ...]"
SUMMARY = """\
list: every run with its size, progress, losses, speed, state, age and disk space.
compare: the options that differ, the losses at common steps, and the results.
remove: deletes runs with all their checkpoints, after a question; a running one stays.
RUN is the name of a run or the path of its folder."""
COLUMNS = ("run", "params", "step", "train loss", "val loss", "best", "tokens/s", "state", "age", "MB", "remarks")
RESULTS = ("run", "state", "step", "tokens", "train loss", "val loss", "best", "tokens/s", "time")
LEFT_ALIGNED = ("run", "state", "remarks", "option")


def run(arguments: list[str]) -> int:
    command = Command("runs", FORMS, SUMMARY, (RunsRequest,))
    parsed = command.parse(arguments)
    request = build_config(RunsRequest, parsed.values)
    action, names = (parsed.words or [""])[0], parsed.words[1:]
    actions: dict[str, tuple[bool, Callable[[list[str], RunsRequest], int]]] = {
        "list": (not names, lambda _names, request: print_runs(request)),
        "compare": (len(names) >= 2, print_comparison),
        "remove": (bool(names), remove_runs),
    }
    if action not in actions or not actions[action][0]:
        raise UserError(f"gptmill runs {' '.join(parsed.words)}: the usage is gptmill runs {FORMS}")
    if request.yes and action != "remove":
        raise UserError("--yes applies only to gptmill runs remove; remove it")
    return actions[action][1](names, request)


def print_runs(request: RunsRequest) -> int:
    """Prints a table of all runs."""
    from gptmill.runs.directory import list_folders
    from gptmill.runs.run_summary import summarize_run

    summaries = [summarize_run(run) for run in list_folders(request.logdir)]
    if not summaries:
        sys.stdout.write(f"{request.logdir}/ has no runs yet\n")
        return 0
    summaries.sort(key=SORT_KEYS[request.sort])
    rows = [make_row(summary) for summary in summaries]
    print_table(COLUMNS, rows)
    total = sum(summary.size_bytes for summary in summaries)
    sys.stdout.write(f"{format_runs(len(rows))}, {total / 1e6:,.1f} MB in total\n")
    return 0


SORT_KEYS: dict[str, Callable[[RunSummary], Any]] = {
    "started": lambda summary: -(summary.started or 0.0),
    "name": lambda summary: summary.name,
    "step": lambda summary: -summary.step,
    "loss": lambda summary: math.inf if summary.best_loss is None else summary.best_loss,
    "size": lambda summary: -summary.size_bytes,
}


def make_row(summary: RunSummary) -> list[str]:
    age = "-" if summary.started is None else format_age(time.time() - summary.started)
    size = f"{summary.size_bytes / 1e6:,.1f}"
    parameters = "-" if summary.parameters is None else format_amount(summary.parameters)
    results = [*format_losses(summary), format_speed(summary), summary.state, age, size]
    return [summary.name, parameters, format_progress(summary), *results, "; ".join(summary.remarks)]


def print_comparison(names: list[str], request: RunsRequest) -> int:
    from gptmill.runs.directory import find_run
    from gptmill.runs.run_comparison import compare_runs

    comparison = compare_runs([find_run(name, request.logdir) for name in names])
    titles = [summary.name for summary in comparison.summaries]
    if comparison.config:
        rows = [[name, *map(str, values)] for name, values in comparison.config.items()]
        print_table(("option", *titles), rows)
    else:
        sys.stdout.write("all options are equal\n")
    if comparison.losses:
        sys.stdout.write(f"\n{comparison.loss_kind} loss\n")
        losses = [[f"{step:,}", *map(format_loss, found)] for step, found in comparison.losses]
        print_table(("step", *titles), losses)
    sys.stdout.write("\n")
    print_table(RESULTS, [make_results(summary) for summary in comparison.summaries])
    return 0


def make_results(summary: RunSummary) -> list[str]:
    tokens = "-" if summary.tokens is None else f"{summary.tokens:,}"
    progress = [summary.name, summary.state, format_progress(summary), tokens]
    return [*progress, *format_losses(summary), format_speed(summary), format_age(summary.seconds)]


def remove_runs(names: list[str], request: RunsRequest) -> int:
    """Removes runs after a question; without a terminal, only with --yes."""
    from gptmill.runs.removal import find_removable, remove_run
    from gptmill.runs.run_summary import measure_tree

    found: dict[RunDirectory, None] = dict.fromkeys(find_removable(name, request.logdir) for name in names)
    sizes = {run: measure_tree(run.path) for run in found}
    if not request.yes and not confirm(sizes):
        sys.stdout.write("nothing was removed\n")
        return exit_codes.FAILED
    for run, size in sizes.items():
        remove_run(run)
        sys.stdout.write(f"removed {run.path}: {size / 1e6:,.1f} MB freed\n")
    return 0


def confirm(sizes: dict[RunDirectory, int]) -> bool:
    """Asks in a terminal; raises UserError where nobody can be asked."""
    if not (sys.stdin and sys.stdin.isatty()):
        raise UserError("gptmill runs remove asks in a terminal; elsewhere, add --yes to remove without a question")
    listed = ", ".join(str(run.path) for run in sizes)
    sys.stdout.write(f"remove {listed} with all checkpoints, {sum(sizes.values()) / 1e6:,.1f} MB? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    printable = [[cell.replace("\n", " ") for cell in row] for row in rows]
    for line in format_table(columns, printable, LEFT_ALIGNED):
        sys.stdout.write(line + "\n")


def format_losses(summary: RunSummary) -> list[str]:
    return [format_loss(loss) for loss in (summary.train_loss, summary.val_loss, summary.best_loss)]


def format_loss(loss: float | None) -> str:
    if loss is None:
        return "-"
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def format_speed(summary: RunSummary) -> str:
    return "-" if summary.tokens_per_second is None else format_amount(summary.tokens_per_second)


def format_progress(summary: RunSummary) -> str:
    return f"{summary.step:,}" + ("" if summary.max_steps is None else f" of {summary.max_steps:,}")


def format_runs(number: int) -> str:
    return f"{number:,} run" + ("" if number == 1 else "s")
