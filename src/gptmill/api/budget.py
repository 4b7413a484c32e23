"""The best model for a time budget: plans, writes a recipe, trains it, and compares the result with the prediction."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptmill.api.configuration import Recipe, parse_fields
from gptmill.api.progress import report_nothing, show_preparing
from gptmill.api.run import Run
from gptmill.api.training import return_run, run_training
from gptmill.config import exit_codes
from gptmill.config.requests import StartOptions
from gptmill.experiments.budget.explanation import explain_plan, explain_result, explain_stop
from gptmill.experiments.budget.planning import BudgetPlan, check_given, parse_budget, plan_budget
from gptmill.experiments.budget.recipe_files import BudgetFiles, write_files
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone
from gptmill.training.loop import Outcome
from gptmill.training.run_request import make_run_request

Say = Callable[[str], None]
# Options of the run that say where it goes, and not what it is: they stay out of the recipe.
LOCATION = ("run_name", "logdir")


@dataclass(frozen=True)
class BudgetOutcome:
    """How a run within a budget ended."""

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

    It is gptmill train --budget: the recipe is written too, and interrupts are those of `train`.
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
    if progress:
        with show_preparing() as report:
            files = write_files(plan, report)
    else:
        files = write_files(plan, report_nothing)
    say(f"the recipe is {files.recipe}; its text is in {files.data_dir}/")
    location = {name: flags[name] for name in LOCATION if name in flags}
    options = StartOptions(time_limit=f"{plan.seconds:.3f}s")
    request = make_run_request(str(files.recipe), location, options, started=started)
    # A number of steps that the user has set stays; the time limit holds in any case.
    request = replace(request, is_paced="max_steps" not in flags, most_paced_steps=plan.most_steps)
    outcome = run_training(request, progress=progress)
    return BudgetOutcome(outcome, files, make_verdict(plan, files, outcome))


def make_verdict(plan: BudgetPlan, files: BudgetFiles, outcome: Outcome) -> str:
    """The measured loss beside the expected one, or why there is none."""
    elapsed = time.monotonic() - plan.started
    if outcome.exit_code not in (0, exit_codes.NOT_SAVED):
        return explain_stop(plan.best.bits_per_byte, elapsed, plan.seconds)
    losses = [event for event in read_events(outcome.run.events) if isinstance(event, EvalDone) and event.step > 0]
    if not losses:
        return ""
    measured = files.to_bits_per_byte(losses[-1].val_loss)
    return explain_result(plan.best.bits_per_byte, plan.situation.law.spread, measured, elapsed, plan.seconds)
