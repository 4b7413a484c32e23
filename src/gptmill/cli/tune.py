"""gptmill tune: a recipe in, its fastest settings out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.extension import make_extension
from gptmill.config.recipes import make_config
from gptmill.config.requests import TuneRequest
from gptmill.config.spelling import spell_flags

if TYPE_CHECKING:
    from gptmill.experiments.tune.search import TrialResult
    from gptmill.experiments.tune.tuner import Tuning

SUMMARY = """\
Finds the mini_batch_size and the compile mode with which RECIPE trains fastest on this machine, on a CPU the number of
threads and the precision too, by measuring short trainings on the recipe's own data; one that runs out of memory or
fails is a line in the table. What a flag gives is kept, and the rest is tried; total_batch_size stays.
RECIPE is the path of a .toml file, or one of these:
"""
COLUMNS = ("setting", "tokens/s", "MFU", "memory", "note")
OF_WORDS = ("setting", "note")


def run(arguments: list[str]) -> int:
    recipe, typed, presets, request = parse_recipe_call("tune", SUMMARY, TuneRequest, arguments)
    from gptmill.experiments.tune.tuner import tune
    from gptmill.training.presets import resolve_presets

    flags = resolve_presets(recipe, typed, presets)
    tuning = tune(recipe, flags, set(typed), request, say)
    print_tuning(tuning, recipe, flags, request)
    return exit_codes.INTERRUPTED if tuning.is_interrupted else 0


def print_tuning(tuning: Tuning, recipe: str | None, flags: dict[str, Any], request: TuneRequest) -> None:
    """The table, and the command that trains with the best of it; the recipe too, where one was asked for."""
    say("")
    for line in make_table(tuning.results, tuning.best) if tuning.results else []:
        say(line)
    if tuning.is_interrupted:
        say("interrupted; this is what was known by then")
    elif tuning.is_cut_short:
        say("ended before all was tried; this is what was known by then")
    if tuning.best is None:
        return
    found = tuning.list_flags(make_config(recipe, flags))
    threads = tuning.best.setting.threads
    say("")
    say(make_command(recipe, {**flags, **found}, threads, request.ranks))
    if request.write is not None and tuning.is_interrupted:
        say(f"{request.write} was not written")
    elif request.write is not None:
        path = Path(request.write)
        of = f"{recipe}, " if recipe else ""
        title = f"{of}tuned by gptmill on {tuning.best.device}: {tuning.best.tokens_per_second:,.0f} tokens/s"
        text = make_extension(path, recipe, {**flags, **found}, set(found), title)
        from gptmill.data.files import write_durably

        write_durably(path, text)
        say(make_command(str(path), {}, threads, request.ranks))


def make_table(results: list[TrialResult], best: TrialResult | None) -> list[str]:
    """A line for each trial, in columns, below their names."""
    table = [list(COLUMNS), *(make_row(result, is_best=result is best) for result in results)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if name in OF_WORDS else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def make_row(result: TrialResult, *, is_best: bool) -> list[str]:
    return [
        result.setting.describe(),
        f"{result.tokens_per_second:,.0f}" if result.has_succeeded else "-",
        "-" if result.mfu is None else f"{result.mfu:.1%}",
        f"{result.memory_gb:.2f} GB" if result.memory_gb else "-",
        f"best; {result.note}" if is_best else result.note,
    ]


def make_command(recipe: str | None, flags: dict[str, Any], threads: int | None, ranks: int) -> str:
    """The line that trains so."""
    words = [f"OMP_NUM_THREADS={threads}"] if threads else []
    if ranks > 1:
        words += ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    words += ["gptmill", "train", *([shlex.quote(recipe)] if recipe else [])]
    words += map(shlex.quote, spell_flags(flags))
    return " ".join(words)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
