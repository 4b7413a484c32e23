"""gptmill train: trains a model from a recipe, or resumes a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmill import cli
from gptmill.cli.checkpoints import print_checkpoints
from gptmill.cli.output import print_line
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import MachineConfig, TrackingConfig
from gptmill.config.schema import build_config
from gptmill.config.serialization import format_flags
from gptmill.runs.directory import RunDirectory, choose_run, find_free_name, make_run_name

if TYPE_CHECKING:
    from gptmill.training.loop import Outcome

SUMMARY = """\
Trains a model from RECIPE with the flags on top, or resumes a run (--resume latest).
RECIPE is the path of a .toml file or one of these:
"""


def run(arguments: list[str]) -> int:
    recipe, flags, presets, options = parse_recipe_call("train", SUMMARY, StartOptions, arguments)
    if options.list_checkpoints:
        print_checkpoints(choose_run(recipe, flags).checkpoints)
        return 0
    if options.budget is not None:
        return run_budgeted(recipe, flags, options, presets)
    if options.supervise:
        return run_supervised(recipe, flags, options, presets)
    if options.resume is None and asks_to_resume(recipe, flags):
        options = replace(options, resume="auto")
    if options.gpus is not None:
        return run_on_gpus(recipe, flags, options, arguments)
    from gptmill.api.training import run_training
    from gptmill.training.launch import Call, make_launch

    request = make_launch(Call(recipe, flags, options, presets), cli.STARTED)
    is_main = os.environ.get("RANK", "0") == "0"
    for change in request.changes if is_main else ():
        sys.stdout.write(f"changed since the run began: {change}\n")
    outcome = run_training(request)
    if is_main:
        try:
            print_outcome(outcome, recipe)
        except FileNotFoundError as error:
            print_error(f"warning: {error.filename} is missing: the run's folder was moved or deleted during training")
    return outcome.exit_code


def run_budgeted(recipe: str | None, flags: dict[str, Any], options: StartOptions, presets: PresetOptions) -> int:
    """Chooses what to train, trains it within the budget, and says how far off the prediction was."""
    if presets != PresetOptions() or replace(options, budget=None) != StartOptions():
        raise UserError(
            "--budget plans a new run from its corpus; leave out --resume, --supervise, --time_limit, --gpus, "
            "--force_cpu, --size and --hardware"
        )
    from gptmill.api.budget import run_budget

    assert options.budget is not None
    result = run_budget(recipe, flags, options.budget, cli.STARTED, print_line)
    print_outcome(result.outcome, str(result.files.recipe))
    if result.verdict:
        print_line(result.verdict)
    return result.outcome.exit_code


def run_on_gpus(recipe: str | None, flags: dict[str, Any], options: StartOptions, arguments: list[str]) -> int:
    """Starts the same command line as one process per GPU."""
    from gptmill.experiments.gpu_launcher import choose_num_ranks, launch_ranks
    from gptmill.experiments.supervisor import drop_flags

    assert options.gpus is not None
    if options.force_cpu:
        raise UserError("--force_cpu runs one step on the CPU; leave out --gpus")
    machine = build_config(MachineConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    num_ranks = choose_num_ranks(options.gpus, machine.device)
    resume = ["--resume", options.resume] if options.resume else []  # the user may have been asked
    return launch_ranks(["train", *drop_flags(arguments, {"gpus": True, "resume": True}), *resume], num_ranks)


def run_supervised(recipe: str | None, flags: dict[str, Any], options: StartOptions, presets: PresetOptions) -> int:
    """Trains in a child process, with a fixed run name so that restarts resume the same run."""
    from gptmill.experiments.supervisor import supervise

    if "RANK" in os.environ:
        raise UserError(
            "torchrun restarts workers itself; instead of --supervise use torchrun --max-restarts=N "
            "with gptmill train --run_name NAME --resume auto"
        )
    if options.force_cpu:
        raise UserError("--force_cpu runs one step and exits; remove --supervise")
    if options.max_restarts < 0:
        raise UserError(f"--max_restarts {options.max_restarts}: must not be negative")
    run = choose_supervised(recipe, flags, options.resume)
    kept = {
        "resume": options.resume,
        "time_limit": options.time_limit,
        "allow_changes": options.allow_changes,
        "gpus": options.gpus,
        "size": presets.size,
        "hardware": presets.hardware,
    }
    given = {name: value for name, value in kept.items() if value}
    words = [recipe] if recipe else []
    arguments = [*words, *format_flags({**flags, **given, "run_name": run.path.name, "logdir": str(run.path.parent)})]
    return supervise(arguments, run, options.max_restarts, lambda text: print_error(f"gptmill: {text}"))


def choose_supervised(recipe: str | None, flags: dict[str, Any], resume: str | None) -> RunDirectory:
    """The run to supervise: an existing one, or the folder of a new one."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    if tracking.run_name is None and resume is not None:
        if resume not in ("auto", "latest", "best") and not resume.isdecimal():
            raise UserError(f"--supervise --resume {resume} needs --run_name NAME, of that run or of a new one")
        try:
            return choose_run(recipe, flags)
        except UserError:
            if resume != "auto":
                raise
    name = tracking.run_name or find_free_name(tracking.logdir, make_run_name(recipe))
    return RunDirectory(Path(tracking.logdir) / name)


def asks_to_resume(recipe: str | None, flags: dict[str, Any]) -> bool:
    """Asks in a terminal whether to resume, if a run of this name has checkpoints; returns the answer."""
    tracking = build_config(TrackingConfig, {**(load_recipe(recipe) if recipe else {}), **flags})
    if tracking.run_name is None or "RANK" in os.environ or not (sys.stdin and sys.stdin.isatty()):
        return False
    run = RunDirectory(Path(tracking.logdir) / tracking.run_name)
    if not run.has_checkpoints:
        return False
    sys.stdout.write(f"run {run.path} already has checkpoints; resume it? [Y/n] ")
    sys.stdout.flush()
    answer = sys.stdin.readline()
    return answer.endswith("\n") and answer.strip().lower() in ("y", "yes", "")


def print_outcome(outcome: Outcome, recipe: str | None) -> None:
    """Prints the report and what to try next; of a run that was stopped, the summary and how to resume."""
    from gptmill.runs.reporting.terminal_report import make_report, make_summary

    program, encoding = find_program(), sys.stdout.encoding or "utf-8"
    logdir = outcome.config.tracking.logdir
    logdir_flag = "" if logdir == "runs" else f" --logdir {shlex.quote(logdir)}"
    name = shlex.quote(outcome.run.path.name)
    resume = f"{program} train --run_name {name}{logdir_flag} --resume latest"
    if outcome.exit_code:
        saved = "saved" if outcome.run.has_checkpoints else "nothing was saved yet"
        reason = saved if outcome.reason.startswith("stopped by") else outcome.reason
        summary = make_summary(outcome.run, encoding)
        sys.stdout.write((f"\n{summary}\n\n" if summary else "") + f"{reason}; resume with: {resume}\n")
        return
    extension = f"--max_steps {2 * outcome.max_steps}"
    if outcome.reason.startswith("stopped early"):
        extension = "--early_stop_patience none"
    prompt = outcome.config.evaluation.sample_prompt
    prompt_flag = f" --prompt {shlex.quote(prompt)}" if prompt.isprintable() else ""
    plugin = outcome.config.plugins.plugin
    plugin_flag = f" --plugin {shlex.quote(plugin)}" if plugin else ""
    lines = [
        f"\n{make_report(outcome.run, encoding)}\n",
        f"The run is in {outcome.run.path}/. Next steps:",
        f"  {program} sample {name}{logdir_flag}{plugin_flag}{prompt_flag}",
        f"  {resume} {extension}",
    ]
    if recipe:  # unknown for a run that is resumed by its name alone
        lines.append(f"  {program} train {shlex.quote(recipe)} --corpus YOUR_TEXT.txt")
    sys.stdout.write("\n".join(lines) + "\n")


def print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def find_program() -> str:
    """The command that calls gptmill in this environment."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m gptmill"
    return "gptmill" if shutil.which("gptmill") else sys.argv[0]
