"""Which other models a budget trains, if its first choice leaves time: the law knows the best size only roughly.

On a small text, the best run is a short one, since more epochs would overfit. What is left of the time goes to the next
smaller and the next larger model, and then to the neighbours of the best so far. The loss on held-out text decides.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from gptmill.experiments.budget.candidate import EVAL_SHARE, Candidate, TokenizerOption
from gptmill.experiments.budget.choice import FORWARD_SHARE, pick_share
from gptmill.experiments.budget.family import Shape
from gptmill.experiments.budget.planning import END_SECONDS, START_SECONDS, BudgetPlan

TIME_MARGIN = 1.1  # what a rival's steps may take more than measured


class Trained(NamedTuple):
    """A candidate, and the loss that it reached."""

    candidate: Candidate
    bits_per_byte: float
    """Infinite for a run that did not reach its last step."""


def choose_rival(plan: BudgetPlan, trained: Sequence[Trained], seconds: float) -> Candidate | None:
    """The most promising model to train in the seconds that are left; None if there is none.

    It is a neighbour in size of the first model, or else of the best so far.
    """
    first, best = trained[0].candidate, min(trained, key=lambda each: each.bits_per_byte).candidate
    tried = {each.candidate.shape for each in trained}
    prepared = {each.candidate.tokenizer for each in trained}
    limit = plan.best.bits_per_byte * math.exp(plan.situation.law.spread)  # the law's errors may be as large
    for centre in (first, best):
        near = [each for each in list_neighbours(plan, centre.shape) if each.shape not in tried]
        fitted = [found for each in near if (found := _fit(plan, each, seconds, prepared)) is not None]
        if hopeful := [each for each in fitted if each.bits_per_byte <= limit]:
            return min(hopeful, key=lambda each: each.bits_per_byte)
    return None


def list_neighbours(plan: BudgetPlan, shape: Shape) -> list[Candidate]:
    """The next smaller and the next larger model, each with its best tokenizer."""
    best_of: dict[Shape, Candidate] = {}
    for candidate in sorted(plan.candidates, key=lambda each: each.bits_per_byte):
        best_of.setdefault(candidate.shape, candidate)
    sizes = sorted(best_of, key=lambda each: each.block_weights)
    place = sizes.index(shape)
    return [best_of[sizes[number]] for number in (place - 1, place + 1) if 0 <= number < len(sizes)]


def list_first_rivals(plan: BudgetPlan) -> list[Candidate]:
    """The neighbours that may follow the best model, in the time that it leaves."""
    trained, left = [Trained(plan.best, plan.best.bits_per_byte)], plan.situation.seconds - _estimate(plan.best)
    return list_neighbours(plan, plan.best.shape) if choose_rival(plan, trained, left) is not None else []


def _fit(
    plan: BudgetPlan, candidate: Candidate, seconds: float, prepared: Container[TokenizerOption]
) -> Candidate | None:
    """The candidate, shortened if need be; None if nothing of it fits into the seconds."""
    left = (seconds - START_SECONDS - END_SECONDS) / TIME_MARGIN
    tokenizer = candidate.tokenizer
    free = replace(tokenizer, bytes_per_second=math.inf) if tokenizer in prepared else tokenizer
    if plan.situation.corpus.text_bytes / free.bytes_per_second + _estimate(candidate) <= left:
        return candidate
    situation = replace(plan.situation, seconds=left)
    found = pick_share(situation, replace(candidate, tokenizer=free), candidate.step_seconds)
    if found is None or _estimate(found) > left:  # with a number of steps that the user has set
        return None
    return replace(found, tokenizer=tokenizer)


def _estimate(candidate: Candidate) -> float:
    """The seconds of its steps and evaluations."""
    return candidate.steps * candidate.step_seconds * (1 + 2 * EVAL_SHARE * FORWARD_SHARE)
