"""train and resume: training as a function call, which returns the run."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

from gptmill.api.configuration import Recipe, parse_fields
from gptmill.api.progress import report_nothing, show_preparing
from gptmill.api.run import Run, find_directory
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.hardware import HardwareName
from gptmill.config.keywords import build_request
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.trust import admit_plugins
from gptmill.config.validation import check_config
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.interactive import is_interactive
from gptmill.runtime.ranks import join_ranks
from gptmill.training import loop
from gptmill.training.launch import Call, make_launch
from gptmill.training.loop import Outcome
from gptmill.training.run_request import RunRequest


def train(
    config: RunConfig | Recipe | None = None,
    *,
    resume: str | int | None = None,
    allow_changes: bool = False,
    time_limit: str | float | None = None,
    size: str | None = None,
    hardware: HardwareName | None = None,
    progress: bool = True,
    **fields: Any,
) -> Run:
    """Trains a run to its end and returns it. All options are those of gptmill train.

    `config` is a RunConfig, or the name or path of a recipe; `fields` go on top. With `resume="auto"`, a run of this
    name that exists is resumed. `time_limit` is a text such as "3h50m", or seconds.

    An interrupt (Ctrl-C; in a notebook, the stop button) saves a checkpoint. In a notebook or at a prompt, the run is
    then returned; elsewhere KeyboardInterrupt is raised. `gptmill.resume` goes on in either case.
    """
    recipe, base = None, dict[str, Any]()
    if isinstance(config, RunConfig):
        check_config(config)
        admit_plugins(config.plugins.plugin, "the RunConfig")  # which may be that of a stranger's run
        base = list_values(config)
        if size is not None or hardware is not None:
            raise UserError("size and hardware fill in what a recipe leaves open; leave them out with a RunConfig")
    elif config is not None:
        recipe = os.fspath(config)
    presets = build_request(PresetOptions, {"size": size, "hardware": hardware})
    options = _make_options(resume, time_limit, allow_changes=allow_changes)
    with join_ranks():
        request = make_launch(Call(recipe, {**base, **parse_fields(recipe, fields)}, options, presets))
        outcome = run_training(request, progress=progress)
    return return_run(outcome)


def resume(
    run: Run | Recipe,
    checkpoint: str | int = "latest",
    *,
    allow_changes: bool = False,
    time_limit: str | float | None = None,
    logdir: str = "runs",
    progress: bool = True,
    **changes: Any,
) -> Run:
    """Resumes a run from a checkpoint: latest, best, a step, or a path; `changes` may make it longer, for example.

    `run` is a Run, or the name or folder of one. What would change the results needs `allow_changes`.
    """
    if "run_name" in changes:
        raise UserError("a resumed run keeps its name; leave out run_name")
    directory = run.directory if isinstance(run, Run) else find_directory(run, logdir)
    location = {"run_name": directory.path.name, "logdir": str(directory.path.parent)}
    options = _make_options(checkpoint, time_limit, allow_changes=allow_changes)
    with join_ranks():
        request = make_launch(Call(None, {**parse_fields(None, changes), **location}, options))
        outcome = run_training(request, progress=progress)
    return return_run(outcome)


def run_training(request: RunRequest, *, progress: bool = True) -> Outcome:
    """Trains as requested, with the progress shown or not: what gptmill train and `train` have in common."""
    if not progress:
        return loop.train(replace(request, is_quiet=True), report_nothing)
    with show_preparing() as report:
        return loop.train(request, report)


def _make_options(resume: str | int | None, time_limit: str | float | None, *, allow_changes: bool) -> StartOptions:
    limit = time_limit if time_limit is None or isinstance(time_limit, str) else f"{float(time_limit):.3f}s"
    given = {"resume": None if resume is None else str(resume), "allow_changes": allow_changes, "time_limit": limit}
    return build_request(StartOptions, given)


def return_run(outcome: Outcome) -> Run:
    """The run; raises UserError if it failed, and hands on the signal that ended it to the program's own handler."""
    run = Run(RunDirectory(outcome.run.path))
    if outcome.exit_code in (exit_codes.DIVERGED, exit_codes.NOT_SAVED):
        raise UserError(f"run {run.path}: {outcome.reason}")
    if outcome.exit_code <= 128:
        return run
    number = outcome.exit_code - 128
    if number == signal.SIGINT and is_interactive():
        saved = "saved" if outcome.run.has_checkpoints else "nothing was saved yet"
        sys.stdout.write(f"interrupted; {saved}; resume with: gptmill.resume({str(run.path)!r})\n")
        return run
    signal.raise_signal(number)
    return run
