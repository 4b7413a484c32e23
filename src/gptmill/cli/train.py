"""gptmill train: a recipe and flags in, a run out."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

from gptmill.cli.flags import check_words, parse_flags
from gptmill.config.recipes import list_recipes, load_recipe
from gptmill.config.requests import LaunchOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields

SUMMARY = "Trains the model of RECIPE (a shipped recipe's name, or the path of a .toml file), with flags on top."


def run(arguments: list[str]) -> int:
    recipe, flags, options = parse(arguments)
    from gptmill.training.launch import choose_run, make_launch

    if options.list_checkpoints:
        return print_checkpoints(choose_run(recipe, flags).checkpoints)
    launch = make_launch(recipe, flags, options)
    from gptmill.cli.progress import show_preparing
    from gptmill.training.loop import train

    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        for change in launch.changes:
            sys.stdout.write(f"changed since the run began: {change}\n")
    with show_preparing() as report:
        outcome = train(launch, report)
    if outcome.stopped_by:
        if is_main:
            sys.stdout.write(
                f"saved; go on with: {command()} train --run_name {outcome.run.path.name} --resume latest\n"
            )
        return 128 + outcome.stopped_by
    if is_main:
        print_report(outcome.run, recipe)
    return 0


def parse(arguments: list[str]) -> tuple[str | None, dict[str, Any], LaunchOptions]:
    """(recipe, config flags, launch options). The help shows the recipe's values as defaults."""
    named = [word for word in arguments[:1] if not word.startswith("-")]
    asks_help = "-h" in arguments or "--help" in arguments
    defaults = load_recipe(named[0]) if named and asks_help else {}
    summary = SUMMARY + "\n\nRecipes: " + "; ".join(f"{name}: {title}" for name, title in list_recipes().items())
    parsed = parse_flags("train", arguments, (LaunchOptions, RunConfig), "[RECIPE]", summary, defaults)
    check_words("train", parsed.words, "at most one recipe", 0, 1)
    option_names = {field.name for field in list_fields(LaunchOptions)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    options = build_config(LaunchOptions, parsed.values)
    recipe = parsed.words[0] if parsed.words else None
    return recipe, flags, options


def print_checkpoints(folder: Any) -> int:
    from gptmill.runs.checkpoints import list_checkpoints

    sys.stdout.write(f"{'step':>9} {'val loss':>9} {'MB':>9}  saved              path\n")
    for info in list_checkpoints(folder):
        loss = f"{info.val_loss:.4f}" if info.val_loss is not None else "-"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved_at))
        sys.stdout.write(f"{info.step:>9,} {loss:>9} {info.size_bytes / 1e6:>9.1f}  {when}   {info.path}\n")
    return 0


def print_report(run: Any, recipe: str | None) -> None:
    from gptmill.runs.report import make_report

    name, program = run.path.name, command()
    logdir = "" if str(run.path.parent) == "runs" else f" --logdir {run.path.parent}"
    sys.stdout.write(f"\n{make_report(run)}\n\nThe run lies in {run.path}/. What to try next:\n")
    sys.stdout.write(f'  {program} sample {name}{logdir} --prompt "def "\n')
    sys.stdout.write(f"  {program} train --run_name {name}{logdir} --resume latest --num_epochs 20\n")
    sys.stdout.write(f"  {program} train {recipe or ''} --corpus PATH/TO/YOUR/TEXT\n")


def command() -> str:
    """How the user can call gptmill from here."""
    return "gptmill" if shutil.which("gptmill") else sys.argv[0]
