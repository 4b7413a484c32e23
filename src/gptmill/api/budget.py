"""The best model for a time budget: plans, writes a recipe, trains it, and compares the result with the prediction."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptmill.api.configuration import Recipe, parse_fields
from gptmill.api.progress import report_nothing, show_preparing
from gptmill.api.run import Run
from gptmill.api.training import return_run, run_training
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.requests import StartOptions
from gptmill.config.run import TrackingConfig
from gptmill.experiments.budget.explanation import (
    compare_rivals,
    explain_plan,
    explain_result,
    explain_rival,
    explain_stop,
)
from gptmill.experiments.budget.planning import BudgetPlan, check_given, parse_budget, plan_budget
from gptmill.experiments.budget.recipe_files import BudgetFiles, write_files
from gptmill.experiments.budget.rivals import Trained, choose_rival
from gptmill.runs.directory import find_free_name
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone
from gptmill.training.loop import Outcome
from gptmill.training.run_request import make_run_request

Say = Callable[[str], None]
# Options of the run that say where it goes, and not what it is: they stay out of the recipe.
LOCATION = ("run_name", "logdir")
SIGNAL_CODES = 128  # exit codes above it are those of a run that a signal ended


@dataclass(frozen=True)
class BudgetOutcome:
    """How training within a budget ended: the run with the lowest loss, or one that was interrupted."""

    outcome: Outcome
    files: BudgetFiles
    verdict: str
    """How far off the prediction was; empty if there is no validation loss."""


def plan_within_budget(corpus: Recipe, budget: str | float, *, progress: bool = True, **fields: Any) -> BudgetPlan:
    """Finds the best model that this machine can train on a text in that time, as gptmill plan --budget does.

    `budget` is a text such as "20m", or seconds; `fields` are options of gptmill train that are already decided. The
    plan's `best` candidate has the expected bits per byte, its `values` are the options of the run.
    """
    started, flags = time.monotonic(), parse_fields(None, {**fields, "corpus": os.fspath(corpus)})
    return make_budget_plan(None, flags, _write_budget(budget), started, _choose_say(progress=progress))


def train_within_budget(corpus: Recipe, budget: str | float, *, progress: bool = True, **fields: Any) -> Run:
    """Plans as `plan_within_budget` does, trains that model inside the same time and returns the run.

    It is gptmill train --budget: the recipe is written too, and interrupts are those of `train`. If there is time left
    for models of other sizes, the run with the lowest validation loss is returned.
    """
    started, flags = time.monotonic(), parse_fields(None, {**fields, "corpus": os.fspath(corpus)})
    say = _choose_say(progress=progress)
    result = run_budget(None, flags, _write_budget(budget), started, say, progress=progress)
    if result.verdict:
        say(result.verdict)
    return return_run(result.outcome)


def _write_budget(budget: str | float) -> str:
    return budget if isinstance(budget, str) else f"{float(budget):.3f}s"


def _choose_say(*, progress: bool) -> Say:
    def write(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return write if progress else lambda _line: None


def make_budget_plan(recipe: str | None, flags: Mapping[str, Any], budget: str, started: float, say: Say) -> BudgetPlan:
    """Plans a budget and says what was chosen and why; trains nothing and writes no file."""
    seconds = parse_budget(budget)
    corpus = check_given(recipe, flags)
    plan = plan_budget(corpus, seconds, started, flags, say)
    for line in explain_plan(plan):
        say(line)
    return plan


def run_budget(
    recipe: str | None,
    flags: Mapping[str, Any],
    budget: str,
    started: float,
    say: Say,
    *,
    progress: bool = True,
) -> BudgetOutcome:
    """Plans and trains; `started` is when the budget began, on time.monotonic()."""
    plan_flags = {name: value for name, value in flags.items() if name not in LOCATION}
    plan = make_budget_plan(recipe, plan_flags, budget, started, say)
    attempts = [_train(plan, flags, (), say, progress=progress)]
    while attempts[0].is_finished and attempts[-1].outcome.exit_code in (0, exit_codes.DIVERGED):
        rival = choose_rival(plan, [each.to_trained() for each in attempts], plan.find_seconds_left())
        if rival is None:
            break
        say(explain_rival(rival))
        try:
            attempts.append(_train(plan.put_first(rival), flags, attempts, say, progress=progress))
        except UserError as error:  # what was trained before is none the worse for it
            say(f"warning: this one cannot be trained: {error}")
            break
    best = min(attempts, key=lambda each: (each.outcome.exit_code != 0, each.bits_per_byte))
    told = attempts[-1] if attempts[-1].is_interrupted else best
    return BudgetOutcome(told.outcome, told.files, make_verdict(attempts, best, told))


@dataclass(frozen=True)
class _Attempt:
    """A model that was trained within a budget."""

    plan: BudgetPlan
    """With this model first."""
    files: BudgetFiles
    outcome: Outcome
    bits_per_byte: float
    """On the validation split; infinite if the run did not reach its last step, or has no such split."""

    @property
    def is_finished(self) -> bool:
        return math.isfinite(self.bits_per_byte)

    @property
    def is_interrupted(self) -> bool:
        return self.outcome.exit_code > SIGNAL_CODES

    def to_trained(self) -> Trained:
        return Trained(self.plan.best, self.bits_per_byte)


def _train(
    plan: BudgetPlan, flags: Mapping[str, Any], before: Sequence[_Attempt], say: Say, *, progress: bool
) -> _Attempt:
    """Trains the best model of the plan; `before` are those that were trained before it."""
    earlier = [each.files for each in before]
    if progress:
        with show_preparing() as report:
            files = write_files(plan, report, earlier)
    else:
        files = write_files(plan, report_nothing, earlier)
    say(f"the recipe is {files.recipe}; its text is in {files.data.folder}/")
    location = {name: flags[name] for name in LOCATION if name in flags}
    if before and "run_name" in location:
        wanted = f"{location['run_name']}-{plan.best.shape.name}"
        location["run_name"] = find_free_name(location.get("logdir", TrackingConfig().logdir), wanted)
    options = StartOptions(time_limit=f"{plan.seconds:.3f}s")
    request = make_run_request(str(files.recipe), location, options, started=plan.started)
    # A number of steps that the user has set stays; the time limit holds in any case.
    request = replace(request, is_paced="max_steps" not in flags, most_paced_steps=plan.most_steps)
    outcome = run_training(request, progress=progress)
    return _Attempt(plan, files, outcome, read_result(files, outcome))


def read_result(files: BudgetFiles, outcome: Outcome) -> float:
    """The bits per byte of a run that reached its last step, else infinity."""
    if outcome.exit_code not in (0, exit_codes.NOT_SAVED):
        return math.inf
    losses = [event for event in read_events(outcome.run.events) if isinstance(event, EvalDone) and event.step > 0]
    return files.data.to_bits_per_byte(losses[-1].val_loss) if losses else math.inf


def make_verdict(attempts: Sequence[_Attempt], best: _Attempt, told: _Attempt) -> str:
    """What each model reached, and the loss of the best beside the expected one, or why there is none."""
    plan, elapsed = best.plan, best.plan.seconds - best.plan.find_seconds_left()
    expected = plan.best.bits_per_byte
    lines = [compare_rivals([each.to_trained() for each in attempts])] if len(attempts) > 1 else []
    if told is not best:
        lines.append(f"the best so far is {best.outcome.run.path}")
    if best.is_finished:
        lines.append(explain_result(expected, plan.spread, best.bits_per_byte, elapsed, plan.seconds))
    elif best.outcome.exit_code not in (0, exit_codes.NOT_SAVED):
        lines.append(explain_stop(expected, elapsed, plan.seconds))
    return "\n".join(lines)
