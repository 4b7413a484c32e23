"""Proof that a killed run goes on as if nothing had happened, on this machine and with this recipe."""

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
from gptmill.experiments.trials import Say, Trials, open_trials_folder, read_log
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.comparison import Comparison, compare_checkpoints
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunStarted, StepLogged, from_json

MIN_STEPS = 4
EVAL_WINDOWS = 16
SLOW_STEPS = 3  # at the start, which say nothing of the speed
SET_HERE = {"max_steps": "--steps", "run_name": "--keep_runs"}


@dataclass(frozen=True)
class ResumeCheck:
    """What came out of it."""

    is_exact: bool
    sentences: list[str]


def check_resume(recipe: str | None, flags: dict[str, Any], request: VerifyResumeRequest, say: Say) -> ResumeCheck:
    """Trains once straight and once with a kill in the middle, and compares every number that is left."""
    for name in SET_HERE.keys() & flags.keys():
        raise UserError(f"--{name} is set by the proof itself; use {SET_HERE[name]} instead")
    if request.steps < MIN_STEPS:
        raise UserError(f"{request.steps} steps are too few to kill a run in their middle; use at least {MIN_STEPS}")
    if "RANK" in os.environ:
        raise UserError("the proof starts processes of its own; call it without torchrun")
    config = make_config(recipe, flags)
    check_config(config, 1)
    with open_trials_folder(request.keep_runs, config.tracking.logdir) as folder:
        arguments = [
            *([recipe] if recipe else []),
            *format_flags({**flags, **_shorten(config, request.steps, folder)}),
        ]
        return _prove(Trials(folder, arguments, request.steps, say), config, request.steps, say)


def _shorten(config: RunConfig, steps: int, folder: Path) -> dict[str, Any]:
    """What is different in a run of a few steps: all that makes training exact or not stays as it is."""
    return {
        "max_steps": steps,
        "checkpoint_freq": max(1, steps // 4),
        "keep_checkpoints": 1,
        "milestone_freq": None,
        "mirror_to": None,
        "eval_freq": max(1, steps // 2),
        "eval_tokens": min(config.evaluation.eval_tokens, EVAL_WINDOWS * config.model.context_length),
        "early_stop_patience": None,
        "log_freq": 1,
        "logdir": str(folder),
    }


def _prove(trials: Trials, config: RunConfig, steps: int, say: Say) -> ResumeCheck:
    is_deterministic = config.machine.deterministic
    say(f"1. {steps:,} steps without a break")
    straight = trials.train("straight")
    say(f"2. the same until it is killed with SIGKILL, after step {steps // 2:,} or so")
    killed, last = trials.train_and_kill("killed", steps // 2)
    say(f"3. going on with it; it was killed after step {last:,}")
    trials.resume(killed)
    likeness = compare_runs(straight, killed)
    sentences = [likeness.describe()]
    if likeness.is_exact:
        sentences.append(f"killed after step {last:,}, it went on from step {_read_start(killed):,}")
    if not likeness.is_exact and not is_deterministic:
        say("4. once more without a break, to see whether this machine repeats itself at all")
        sentences.append(_describe_again(compare_runs(straight, trials.train("again"))))
    if is_deterministic:
        say("4. once more without --deterministic, to see what it costs")
        sentences.append(describe_cost(straight, trials.train("fast", "--no_deterministic")))
    return ResumeCheck(likeness.is_exact, sentences)


@dataclass(frozen=True)
class Difference:
    """Two runs of the same steps, compared."""

    comparison: Comparison
    log_lines: int
    parting: tuple[str, str] | None
    """The first lines of their logs that differ."""

    @property
    def is_exact(self) -> bool:
        return self.comparison.has_same_tensors and self.parting is None and not self.moved

    @property
    def moved(self) -> list[str]:
        """Differences in how far they are."""
        return [value for value in self.comparison.values if value.startswith(("step:", "windows_read:"))]

    def describe(self) -> str:
        groups = " and ".join(group.name for group in self.comparison.groups)
        if self.is_exact:
            return f"bit-identical: {self.comparison.tensors:,} tensors of {groups}, {self.log_lines:,} lines of log"
        tensors = f"all {self.comparison.tensors:,} tensors of {groups} are the same"
        if not self.comparison.has_same_tensors:
            count = self.comparison.tensors - self.comparison.identical
            tensors = f"{count:,} of {self.comparison.tensors:,} tensors of {groups} differ"
            if (furthest := self.comparison.largest) is not None:
                tensors += f", most of all {furthest.name}, by up to {furthest.max_abs:.2g}"
        return "they part: " + "; ".join([*self._describe_logs(), tensors, *self.moved])

    def _describe_logs(self) -> list[str]:
        if self.parting is None:
            return ["their logs are the same"]
        one, other = (line.split() for line in self.parting)
        if one[:2] != other[:2]:
            return [f"their logs part at {self.parting[0] or 'the end'!r} and {self.parting[1] or 'the end'!r}"]
        kind = "losses" if one[1] == "train" else "validation losses"
        return [f"their {kind} differ from step {one[0]} on ({one[2]} and {other[2]})"]


def compare_runs(first: RunDirectory, second: RunDirectory) -> Difference:
    """Compares what two runs ended with and what they logged on their way."""
    ends = [list_step_folders(run.checkpoints)[-1] for run in (first, second)]
    logs = [read_log(run) for run in (first, second)]
    pairs = ((one, other) for one, other in zip_longest(*logs, fillvalue="") if one != other)
    return Difference(compare_checkpoints(*ends), len(logs[0]), next(pairs, None))


def describe_cost(deterministic: RunDirectory, fast: RunDirectory) -> str:
    """What determinism costs, by the median speed of the steps."""
    slower, faster = (_read_speed(run) for run in (deterministic, fast))
    cost = (
        f"{1 - slower / faster:.1%} of the speed" if slower < faster else "nothing that can be measured in these steps"
    )
    return f"--deterministic costs {cost}: {slower:,.0f} tokens/s against {faster:,.0f} without it"


def _describe_again(likeness: Difference) -> str:
    if likeness.is_exact:
        return "two runs without a break are the same: it is going on that is not exact; please report this"
    return (
        f"two runs without a break differ as well: {likeness.describe().removeprefix('they part: ')}; so this device's "
        f"algorithms do not repeat themselves, and going on may still be exact: try again with --deterministic"
    )


def _read_start(run: RunDirectory) -> int:
    """The step from which a run was started last."""
    return [event for event in _read_events(run) if isinstance(event, RunStarted)][-1].step


def _read_speed(run: RunDirectory) -> float:
    speeds = [event.tokens_per_second for event in _read_events(run) if isinstance(event, StepLogged)]
    return statistics.median(speeds[SLOW_STEPS:] or speeds)


def _read_events(run: RunDirectory) -> list[Any]:
    return [from_json(line) for line in run.events.read_text(encoding="utf-8").split("\n")[:-1]]
