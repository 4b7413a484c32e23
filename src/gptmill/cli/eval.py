"""gptmill eval: evaluates a model on tasks, on a split of a corpus, on a text or by what it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill.cli.flags import Command
from gptmill.cli.output import format_table, print_line
from gptmill.config.errors import UserError
from gptmill.config.eval_request import EvalRequest
from gptmill.config.schema import build_config
from gptmill.data.files import write_durably

if TYPE_CHECKING:
    from gptmill.api.evaluation import Scored

SUMMARY = """\
Evaluates a model. MODEL is the name of a run, the path of its folder or of a checkpoint, or a Hugging Face folder.
Without --tasks, --text and --samples: loss, perplexity and bits per byte of the validation split of the run's corpus.
Tasks are scored as lm-evaluation-harness does; gptmill eval --tasks list shows them. --harness runs the library."""
COLUMNS = ("task", "metric", "value", "stderr", "of")
LEFT_ALIGNED = ("task", "metric")


def run(arguments: list[str]) -> int:
    command = Command("eval", "MODEL", SUMMARY, (EvalRequest,), aliases={"step": "checkpoint"})
    parsed = command.parse(arguments)
    request = build_config(EvalRequest, parsed.values)
    if "data_dir" in parsed.values and request.data_dir is None:
        raise UserError("--data_dir none names no corpus; leave it out for the run's own, or give a folder (./none)")
    if request.tasks == "list" and not parsed.words:
        return print_tasks()
    command.check_words(parsed.words, 1, 1)
    check_output(request.json)
    from gptmill.api.evaluation import Inputs, check_request, score_source
    from gptmill.runtime.gpu_warm_up import start_warm_up
    from gptmill.runtime.world import open_world

    check_request(request)
    if request.harness is not None:
        return print_harness(parsed.words[0], request)
    found = list["Scored"]()
    with open_world(request.loading.device) as world:
        start_warm_up(world.device)
        inputs = Inputs(request)
        try:
            for scored in score_source(parsed.words[0], inputs, world):
                found.append(scored)
        finally:  # Ctrl-C too: what is known by then is shown
            if world.is_main and found:
                report(found, request, parsed.words[0])
    if not found:
        raise UserError(f"{parsed.words[0]}: no checkpoint could be evaluated; the warnings say why")
    return 0


def print_harness(source: str, request: EvalRequest) -> int:
    from gptmill.api.harness import score_by_harness

    results = score_by_harness(source, request)
    print_line(results.tables)
    if request.json is not None:
        record = {"model": source, "limit": request.limit, "harness": results.metrics}
        write_durably(Path(request.json), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


def print_tasks() -> int:
    from gptmill.evals.task import list_tasks

    tasks = list_tasks()
    width = max(map(len, tasks)) + 2
    for name, title in tasks.items():
        print_line(f"{name:<{width}}{title}")
    return 0


def check_output(path: str | None) -> None:
    """Raises UserError before anything is computed if the results cannot be written."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    is_taken = Path(path).exists() and not Path(path).is_file()  # by a folder, a device or a pipe
    if not path or is_taken or not os.access(folder, os.W_OK):
        raise UserError(f"--json {path}: cannot write this file; choose another path")


def report(found: list[Scored], request: EvalRequest, source: str) -> None:
    is_curve = request.all or request.every is not None
    for line in describe_curve(found) if is_curve else describe_scores(found):
        print_line(line)
    if request.json is not None:
        record = {"model": source, "limit": request.limit, "results": [make_record(scored) for scored in found]}
        write_durably(Path(request.json), json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def describe_scores(found: list[Scored]) -> list[str]:
    """A line for each metric of a model."""
    rows, notes = [], []
    for scored in found:
        scores = scored.scores
        for metric, measured in scores.metrics.items():
            rows.append(
                (scores.name, metric, format_number(measured.value), format_number(measured.stderr), count(scored))
            )
        if num_cropped := getattr(scores, "num_cropped", 0):
            notes.append(
                f"{scores.name}: {num_cropped:,} sequences were longer than the context and lost their beginning"
            )
    return [f"step {found[0].step:,}", *format_table(COLUMNS, rows, LEFT_ALIGNED), *notes]


def describe_curve(found: list[Scored]) -> list[str]:
    """A line for each step, with a column for each metric."""
    table: dict[int, dict[str, str]] = {}
    for scored in found:
        for metric, measured in scored.scores.metrics.items():
            stderr = "" if measured.stderr is None else f" ± {format_number(measured.stderr)}"
            column = f"{scored.scores.name} {metric}"
            table.setdefault(scored.step, {})[column] = format_number(measured.value) + stderr
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    rows = [(f"{step:,}", *(row.get(column, "") for column in columns)) for step, row in table.items()]
    return format_table(("step", *columns), rows, ())


def count(scored: Scored) -> str:
    scores = scored.scores
    number = getattr(scores, "num_examples", None)
    return f"{number:,} examples" if number is not None else f"{getattr(scores, 'num_tokens', 0):,} tokens"


def format_number(value: float | None) -> str:
    """Four decimals, or fewer of a large number."""
    if value is None:
        return "-"
    return f"{value:,.4f}" if abs(value) < 1_000 else f"{value:,.4g}"


def make_record(scored: Scored) -> dict[str, Any]:
    """The scores as JSON values."""
    from dataclasses import asdict

    return {"step": scored.step, **asdict(scored.scores)}
