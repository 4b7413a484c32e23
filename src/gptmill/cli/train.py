"""gptmill train: a recipe and flags in, a run out."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill.cli.flags import Command
from gptmill.config.recipes import find_recipe_problems, list_recipes, load_recipe
from gptmill.config.requests import LaunchOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields

if TYPE_CHECKING:
    from gptmill.training.loop import Outcome

SUMMARY = """\
Trains the model of RECIPE with the flags on top, or goes on with a run (--resume latest).
RECIPE is the path of a .toml file, or one of these:
"""


def run(arguments: list[str]) -> int:
    recipe, flags, options = parse(arguments)
    from gptmill.training.launch import choose_run, make_launch

    if options.list_checkpoints:
        print_checkpoints(choose_run(recipe, flags).checkpoints)
        return 0
    launch = make_launch(recipe, flags, options)
    from gptmill.cli.progress import show_preparing
    from gptmill.training.loop import train

    is_main = os.environ.get("RANK", "0") == "0"
    for change in launch.changes if is_main else ():
        sys.stdout.write(f"changed since the run began: {change}\n")
    with show_preparing() as report:
        outcome = train(launch, report)
    if is_main:
        print_outcome(outcome, recipe)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def parse(arguments: list[str]) -> tuple[str | None, dict[str, Any], LaunchOptions]:
    """(recipe, config flags, launch options). The help shows the values of a recipe that is named first."""
    summary = SUMMARY + "\n".join(f"  {name:<22}{title}" for name, title in list_recipes().items())
    command = Command("train", "[RECIPE]", summary, (LaunchOptions, RunConfig), find_recipe_problems)
    asks_help = "-h" in arguments or "--help" in arguments
    names_recipe = not arguments[0].startswith("-") if arguments else False
    parsed = command.parse(arguments, load_recipe(arguments[0]) if asks_help and names_recipe else None)
    command.check_words(parsed.words, 0, 1)
    option_names = {field.name for field in list_fields(LaunchOptions)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    return (parsed.words[0] if parsed.words else None), flags, build_config(LaunchOptions, parsed.values)


def print_checkpoints(folder: Path) -> None:
    from gptmill.runs.checkpoints.storage import list_checkpoints

    sys.stdout.write(f"{'step':>9} {'val loss':>9} {'MB':>9}  saved              path\n")
    for info in list_checkpoints(folder):
        loss = f"{info.val_loss:.4f}" if info.val_loss is not None else "-"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved_at))
        sys.stdout.write(f"{info.step:>9,} {loss:>9} {info.size_bytes / 1e6:>9.1f}  {when}   {info.path}\n")


def print_outcome(outcome: Outcome, recipe: str | None) -> None:
    """What was learnt, and what one could do next; after a stop, only how to go on."""
    from gptmill.runs.report import make_report

    program = find_program()
    place = (
        "" if outcome.config.tracking.logdir == "runs" else f" --logdir {shlex.quote(outcome.config.tracking.logdir)}"
    )
    name = shlex.quote(outcome.run.path.name)
    go_on = f"{program} train --run_name {name}{place} --resume latest"
    if outcome.stopped_by:
        sys.stdout.write(f"saved; go on with: {go_on}\n")
        return
    prompt = outcome.config.evaluation.sample_prompt
    asking = f" --prompt {shlex.quote(prompt)}" if prompt.isprintable() else ""
    lines = [
        f"\n{make_report(outcome.run, sys.stdout.encoding or 'utf-8')}\n",
        f"The run lies in {outcome.run.path}/. What to try next:",
        f"  {program} sample {name}{place}{asking}",
        f"  {go_on} --max_steps {2 * outcome.max_steps}",
        f"  {program} train {shlex.quote(recipe or 'demo')} --corpus YOUR_TEXT.txt",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def find_program() -> str:
    """How the user can call gptmill again from here."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m gptmill"
    return "gptmill" if shutil.which("gptmill") else sys.argv[0]
