"""gptmill train: a recipe and flags in, a run out."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill.cli.checkpoints import print_checkpoints
from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.recipes import find_recipe_problems, list_recipes, load_recipe
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.config.schema import build_config, list_fields
from gptmill.config.spelling import spell_flags
from gptmill.runs.directory import RunDirectory, choose_run, find_free_name, make_run_name

if TYPE_CHECKING:
    from gptmill.training.loop import Outcome

SUMMARY = """\
Trains the model of RECIPE with the flags on top, or goes on with a run (--resume latest).
RECIPE is the path of a .toml file, or one of these:
"""


def run(arguments: list[str]) -> int:
    recipe, flags, options, presets = parse(arguments)
    if options.list_checkpoints:
        print_checkpoints(choose_run(recipe, flags).checkpoints)
        return 0
    if options.supervise:
        return run_supervised(recipe, flags, options, presets)
    if options.resume is None and wants_to_go_on(recipe, flags):
        options = replace(options, resume="auto")
    from gptmill.cli.progress import show_preparing
    from gptmill.training.loop import train
    from gptmill.training.run_request import make_run_request

    request = make_run_request(recipe, flags, options, presets)
    is_main = os.environ.get("RANK", "0") == "0"
    for change in request.changes if is_main else ():
        sys.stdout.write(f"changed since the run began: {change}\n")
    with show_preparing() as report:
        outcome = train(request, report)
    if is_main:
        try:
            print_outcome(outcome, recipe)
        except FileNotFoundError as error:
            print_line(f"warning: {error.filename} is gone: the run's folder was moved or deleted while it trained")
    return outcome.exit_code


def run_supervised(recipe: str | None, flags: dict[str, Any], options: StartOptions, presets: PresetOptions) -> int:
    """The same command in a process of its own, under a name that its successors can go on with."""
    from gptmill.experiments.supervisor import supervise

    if "RANK" in os.environ:
        raise UserError(
            "torchrun starts its own workers again; instead of --supervise give it --max-restarts=N, "
            "and gptmill train --run_name NAME --resume auto"
        )
    if options.force_cpu:
        raise UserError("--force_cpu does one step and exits; leave out --supervise")
    if options.max_restarts < 0:
        raise UserError(f"--max_restarts {options.max_restarts}: must not be negative")
    run = choose_supervised(recipe, flags, options.resume)
    kept = {
        "resume": options.resume,
        "time_limit": options.time_limit,
        "allow_changes": options.allow_changes,
        "size": presets.size,
        "hardware": presets.hardware,
    }
    given = {name: value for name, value in kept.items() if value}
    words = [recipe] if recipe else []
    arguments = [*words, *spell_flags({**flags, **given, "run_name": run.path.name, "logdir": str(run.path.parent)})]
    return supervise(arguments, run, options.max_restarts, lambda text: print_line(f"gptmill: {text}"))


def choose_supervised(recipe: str | None, flags: dict[str, Any], resume: str | None) -> RunDirectory:
    """The run that is supervised: one that exists, or the name of a new one."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    if tracking.run_name is None and resume is not None:
        if resume not in ("auto", "latest", "best") and not resume.isdecimal():
            raise UserError(f"--supervise --resume {resume} needs --run_name NAME: that of its run, or of a new one")
        try:
            return choose_run(recipe, flags)
        except UserError:
            if resume != "auto":
                raise
    name = tracking.run_name or find_free_name(tracking.logdir, make_run_name(recipe))
    return RunDirectory(Path(tracking.logdir) / name)


def wants_to_go_on(recipe: str | None, flags: dict[str, Any]) -> bool:
    """Whether a run of this name exists and the user, asked for it, wants to go on with it."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    if tracking.run_name is None or "RANK" in os.environ or not (sys.stdin and sys.stdin.isatty()):
        return False
    run = RunDirectory(Path(tracking.logdir) / tracking.run_name)
    if not run.has_checkpoints:
        return False
    sys.stdout.write(f"run {run.path} has checkpoints already; go on with it? [Y/n] ")
    sys.stdout.flush()
    answer = sys.stdin.readline()
    return answer.endswith("\n") and answer.strip().lower() in ("y", "yes", "")


def parse(arguments: list[str]) -> tuple[str | None, dict[str, Any], StartOptions, PresetOptions]:
    """(recipe, config flags, start options, presets). The help shows the values of a recipe that is named first."""
    summary = SUMMARY + "\n".join(f"  {name:<24}{title}" for name, title in list_recipes().items())
    command = Command("train", "[RECIPE]", summary, (StartOptions, PresetOptions, RunConfig), find_recipe_problems)
    asks_help = "-h" in arguments or "--help" in arguments
    names_recipe = not arguments[0].startswith("-") if arguments else False
    parsed = command.parse(arguments, load_recipe(arguments[0]) if asks_help and names_recipe else None)
    command.check_words(parsed.words, 0, 1)
    option_names = {field.name for kind in (StartOptions, PresetOptions) for field in list_fields(kind)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    recipe = parsed.words[0] if parsed.words else None
    return recipe, flags, build_config(StartOptions, parsed.values), build_config(PresetOptions, parsed.values)


def print_outcome(outcome: Outcome, recipe: str | None) -> None:
    """What was learnt, and what one could do next; after a stop, only how to go on."""
    from gptmill.runs.report import make_report

    program = find_program()
    place = (
        "" if outcome.config.tracking.logdir == "runs" else f" --logdir {shlex.quote(outcome.config.tracking.logdir)}"
    )
    name = shlex.quote(outcome.run.path.name)
    go_on = f"{program} train --run_name {name}{place} --resume latest"
    if outcome.exit_code:
        is_saved = "saved" if outcome.run.has_checkpoints else "nothing was saved yet"
        said = is_saved if outcome.reason.startswith("stopped by") else outcome.reason
        sys.stdout.write(f"{said}; go on with: {go_on}\n")
        return
    further = f"--max_steps {2 * outcome.max_steps}"
    if outcome.reason.startswith("stopped early"):
        further = "--early_stop_patience none"
    prompt = outcome.config.evaluation.sample_prompt
    asking = f" --prompt {shlex.quote(prompt)}" if prompt.isprintable() else ""
    lines = [
        f"\n{make_report(outcome.run, sys.stdout.encoding or 'utf-8')}\n",
        f"The run lies in {outcome.run.path}/. What to try next:",
        f"  {program} sample {name}{place}{asking}",
        f"  {go_on} {further}",
        f"  {program} train {shlex.quote(recipe or 'demo')} --corpus YOUR_TEXT.txt",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def find_program() -> str:
    """How the user can call gptmill again from here."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m gptmill"
    return "gptmill" if shutil.which("gptmill") else sys.argv[0]
