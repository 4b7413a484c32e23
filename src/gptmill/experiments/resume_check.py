"""Checks on this machine that a run of this recipe, killed and resumed, is bit-identical to an uninterrupted one."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import VerifyResumeRequest
from gptmill.config.run import RunConfig
from gptmill.config.serialization import format_flags
from gptmill.config.validation import check_config
from gptmill.experiments.child_run import Say
from gptmill.experiments.trials import UNTRACKED, Trials, open_trials_folder
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.comparison import Comparison, compare_checkpoints
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import RunStarted, StepLogged

MIN_STEPS = 4
EVAL_WINDOWS = 16
EVAL_EXAMPLES = 8  # of each task
WARM_UP_STEPS = 3  # excluded from the median speed
SET_HERE = {"max_steps": "--steps", "run_name": "--keep_runs"}


@dataclass(frozen=True)
class ResumeCheck:
    """The outcome: whether the runs are bit-identical, and sentences for the user."""

    is_exact: bool
    sentences: list[str]


def check_resume(recipe: str | None, flags: dict[str, Any], request: VerifyResumeRequest, say: Say) -> ResumeCheck:
    """Trains once without interruption and once with a kill in the middle, and compares checkpoints and logs."""
    for name in SET_HERE.keys() & flags.keys():
        raise UserError(f"--{name} is set by the resume check itself; use {SET_HERE[name]} instead")
    if request.steps < MIN_STEPS:
        raise UserError(f"--steps {request.steps}: too few to kill a run in the middle; use at least {MIN_STEPS}")
    if "RANK" in os.environ:
        raise UserError("the resume check starts its own processes; run it without torchrun")
    config = make_config(recipe, flags)
    check_config(config, 1)
    with open_trials_folder(request.keep_runs, config.tracking.logdir) as folder:
        arguments = [
            *([recipe] if recipe else []),
            *format_flags({**flags, **_shorten(config, request.steps, folder)}),
        ]
        return _train_and_compare(Trials(folder, arguments, request.steps, say), config, request.steps, say)


def _shorten(config: RunConfig, steps: int, folder: Path) -> dict[str, Any]:
    """Returns the flags of a run of a few steps; everything that decides whether training is exact stays."""
    return {
        "max_steps": steps,
        "checkpoint_freq": max(1, steps // 4),
        "keep_checkpoints": 1,
        "milestone_freq": None,
        "mirror_to": None,
        "init_from": None,
        "eval_freq": max(1, steps // 2),
        "eval_tokens": min(config.evaluation.eval_tokens, EVAL_WINDOWS * config.model.context_length),
        "eval_task_freq": None,
        "eval_task_limit": EVAL_EXAMPLES,
        "early_stop_patience": None,
        "log_freq": 1,
        **UNTRACKED,
        "logdir": str(folder),
    }


def _train_and_compare(trials: Trials, config: RunConfig, steps: int, say: Say) -> ResumeCheck:
    is_deterministic = config.machine.deterministic
    say(f"1. training {steps:,} steps without interruption")
    straight = trials.train("straight")
    say(f"2. training again, to be killed with SIGKILL after about step {steps // 2:,}")
    killed, last = trials.train_and_kill("killed", steps // 2)
    say(f"3. resuming; the run was killed after step {last:,}")
    trials.resume(killed)
    difference = compare_runs(straight, killed)
    sentences = [difference.describe()]
    if difference.is_exact:
        sentences.append(f"killed after step {last:,}, resumed from step {_read_start(killed):,}")
    if not difference.is_exact and not is_deterministic:
        say("4. training once more without interruption, to see whether this machine is deterministic at all")
        sentences.append(_describe_repetition(compare_runs(straight, trials.train("again"))))
    if is_deterministic:
        say("4. training once more without --deterministic, to measure its cost")
        sentences.append(describe_cost(straight, trials.train("fast", "--no_deterministic")))
    return ResumeCheck(difference.is_exact, sentences)


@dataclass(frozen=True)
class Difference:
    """What differs between two runs of the same steps."""

    comparison: Comparison
    log_lines: int
    first_mismatch: tuple[str, str] | None
    """The first lines of their logs that differ."""

    @property
    def is_exact(self) -> bool:
        return self.comparison.has_same_tensors and self.first_mismatch is None and not self.progress

    @property
    def progress(self) -> list[str]:
        """Differences in the step or the data position."""
        return [value for value in self.comparison.values if value.startswith(("step:", "windows_read:"))]

    def describe(self) -> str:
        groups = " and ".join(group.name for group in self.comparison.groups)
        if self.is_exact:
            return f"bit-identical: {self.comparison.tensors:,} tensors of {groups}, {self.log_lines:,} log lines"
        tensors = f"all {self.comparison.tensors:,} tensors of {groups} are the same"
        if not self.comparison.has_same_tensors:
            count = self.comparison.tensors - self.comparison.identical
            tensors = f"{count:,} of {self.comparison.tensors:,} tensors of {groups} differ"
            if (largest := self.comparison.largest) is not None:
                tensors += f", {largest.name} the most, by up to {largest.max_abs:.2g}"
        return "not identical: " + "; ".join([*self._describe_logs(), tensors, *self.progress])

    def _describe_logs(self) -> list[str]:
        if self.first_mismatch is None:
            return ["the logs are the same"]
        first, second = (line.split() for line in self.first_mismatch)
        if first[:2] != second[:2]:
            shown = [repr(line) if line else "the end" for line in self.first_mismatch]
            return [f"the logs differ from {shown[0]} and {shown[1]} on"]
        kind = "losses" if first[1] == "train" else "validation losses"
        return [f"the {kind} differ from step {first[0]} on ({first[2]} and {second[2]})"]


def compare_runs(first: RunDirectory, second: RunDirectory) -> Difference:
    """Compares the last checkpoints and the text logs of two runs."""
    checkpoints = [list_step_folders(run.checkpoints)[-1] for run in (first, second)]
    logs = [run.text_log.read_text(encoding="utf-8").split("\n")[:-1] for run in (first, second)]
    mismatches = ((one, other) for one, other in zip_longest(*logs, fillvalue="") if one != other)
    return Difference(compare_checkpoints(*checkpoints), len(logs[0]), next(mismatches, None))


def describe_cost(deterministic: RunDirectory, fast: RunDirectory) -> str:
    """Describes what determinism costs, by the median speed of the steps."""
    slower, faster = (_read_speed(run) for run in (deterministic, fast))
    cost = f"{1 - slower / faster:.1%} of the speed" if slower < faster else "nothing measurable in these steps"
    return f"--deterministic costs {cost}: {slower:,.0f} tokens/s against {faster:,.0f} without it"


def _describe_repetition(difference: Difference) -> str:
    if difference.is_exact:
        return "two uninterrupted runs are identical, so resuming is what is not exact; please report this"
    return (
        f"two uninterrupted runs differ as well: {difference.describe().removeprefix('not identical: ')}; this device "
        f"uses nondeterministic algorithms, and resuming may still be exact: try again with --deterministic"
    )


def _read_start(run: RunDirectory) -> int:
    """Returns the step from which the run was started last."""
    return [event for event in read_events(run.events) if isinstance(event, RunStarted)][-1].step


def _read_speed(run: RunDirectory) -> float:
    """Returns the median tokens per second after the warm-up."""
    speeds = [event.tokens_per_second for event in read_events(run.events) if isinstance(event, StepLogged)]
    return statistics.median(speeds[WARM_UP_STEPS:] or speeds)
