"""gptmill tune: finds the fastest settings for a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill.cli.output import format_table, print_line
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.recipes import make_config
from gptmill.config.requests import TuneRequest
from gptmill.config.serialization import format_flags, make_extension

if TYPE_CHECKING:
    from gptmill.experiments.tune.search import TrialResult
    from gptmill.experiments.tune.tuner import Tuning

SUMMARY = """\
Finds the mini_batch_size and compile mode with the highest throughput for RECIPE on this machine, on a CPU also the
number of threads and the precision, by short training runs on the recipe's own data. Trials that run out of memory or
fail are listed too. Settings given as flags are not varied; total_batch_size stays the same.
RECIPE is the path of a .toml file or one of these:
"""
COLUMNS = ("setting", "tokens/s", "MFU", "memory", "note")
LEFT_ALIGNED = ("setting", "note")


def run(arguments: list[str]) -> int:
    recipe, typed, presets, request = parse_recipe_call("tune", SUMMARY, TuneRequest, arguments)
    from gptmill.experiments.tune.tuner import tune
    from gptmill.training.presets import check_size_is_chosen, resolve_presets

    check_size_is_chosen(recipe, typed, presets, "tune")
    flags = resolve_presets(recipe, typed, presets)
    tuning = tune(recipe, flags, set(typed), request, print_line)
    print_tuning(tuning, recipe, flags, request)
    return exit_codes.INTERRUPTED if tuning.is_interrupted else 0


def print_tuning(tuning: Tuning, recipe: str | None, flags: dict[str, Any], request: TuneRequest) -> None:
    """Prints the table and the command for the best setting; writes the recipe if --write asks for it."""
    print_line("")
    for line in make_table(tuning.results, tuning.best) if tuning.results else []:
        print_line(line)
    if tuning.is_interrupted:
        print_line("interrupted; these are the results so far")
    elif tuning.is_cut_short:
        print_line("stopped before all settings were tried; these are the results so far")
    if tuning.best is None:
        return
    best_flags = tuning.list_flags(make_config(recipe, flags))
    threads = tuning.best.setting.threads
    print_line("")
    print_line(make_command(recipe, {**flags, **best_flags}, threads, request.ranks))
    if request.write is not None and tuning.is_interrupted:
        print_line(f"{request.write} was not written")
    elif request.write is not None:
        path = Path(request.write)
        prefix = f"{recipe}, " if recipe else ""
        title = f"{prefix}tuned by gptmill on {tuning.best.device}: {tuning.best.tokens_per_second:,.0f} tokens/s"
        text = make_extension(path, recipe, {**flags, **best_flags}, set(best_flags), title)
        from gptmill.data.files import write_durably

        write_durably(path, text)
        print_line(make_command(str(path), {}, threads, request.ranks))


def make_table(results: list[TrialResult], best: TrialResult | None) -> list[str]:
    """The lines of a table with one row per trial."""
    return format_table(COLUMNS, [make_row(result, is_best=result is best) for result in results], LEFT_ALIGNED)


def make_row(result: TrialResult, *, is_best: bool) -> list[str]:
    return [
        result.setting.describe(),
        f"{result.tokens_per_second:,.0f}" if result.has_succeeded else "-",
        "-" if result.mfu is None else f"{result.mfu:.1%}",
        f"{result.memory_gb:.2f} GB" if result.memory_gb else "-",
        f"best; {result.note}" if is_best else result.note,
    ]


def make_command(recipe: str | None, flags: dict[str, Any], threads: int | None, ranks: int) -> str:
    """The command line that trains with these settings."""
    words = [f"OMP_NUM_THREADS={threads}"] if threads else []
    if ranks > 1:
        words += ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    words += ["gptmill", "train", *([shlex.quote(recipe)] if recipe else [])]
    words += map(shlex.quote, format_flags(flags))
    return " ".join(words)
