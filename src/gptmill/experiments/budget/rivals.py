"""Which other models a budget trains, if its first choice leaves time: the law knows the best size only roughly.

On a small text, the best run is a short one, since more epochs would overfit. What is left of the time goes to the next
smaller and the next larger model, and then to the neighbours of the best so far. The loss on held-out text decides.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from gptmill.experiments.budget.candidate import Candidate, TokenizerOption
from gptmill.experiments.budget.choice import pick_share
from gptmill.experiments.budget.family import Shape
from gptmill.experiments.budget.planning import END_SECONDS, START_SECONDS, BudgetPlan

TIME_MARGIN = 1.1  # by this factor, the steps of a rival may be slower than measured


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
    tried = [each.candidate for each in trained]
    for centre in (first, best):
        if found := _list_hopeful(plan, centre.shape, tried, seconds):
            return min(found, key=lambda each: each.bits_per_byte)
    return None


def list_first_rivals(plan: BudgetPlan) -> list[Candidate]:
    """The neighbours of the best model, each of which fits into the time that it leaves."""
    left = plan.situation.seconds - plan.best.training_seconds
    return _list_hopeful(plan, plan.best.shape, [plan.best], left)


def _list_hopeful(plan: BudgetPlan, shape: Shape, tried: Sequence[Candidate], seconds: float) -> list[Candidate]:
    """The neighbours of a size that were not tried, fit into the seconds, and may be the best for all the law knows."""
    near = [each for each in _list_neighbours(plan, shape) if each.shape not in {other.shape for other in tried}]
    prepared = {each.tokenizer for each in tried}
    fitted = [found for each in near if (found := _fit(plan, each, seconds, prepared)) is not None]
    limit = plan.best.bits_per_byte * math.exp(plan.situation.law.spread)
    return [each for each in fitted if each.bits_per_byte <= limit]


def _list_neighbours(plan: BudgetPlan, shape: Shape) -> list[Candidate]:
    """The next smaller and the next larger model, each with its best tokenizer."""
    best_of: dict[Shape, Candidate] = {}
    for candidate in sorted(plan.candidates, key=lambda each: each.bits_per_byte):
        best_of.setdefault(candidate.shape, candidate)
    sizes = sorted(best_of, key=lambda each: each.block_weights)
    place = sizes.index(shape)
    return [best_of[sizes[number]] for number in (place - 1, place + 1) if 0 <= number < len(sizes)]


def _fit(
    plan: BudgetPlan, candidate: Candidate, seconds: float, prepared: Container[TokenizerOption]
) -> Candidate | None:
    """The candidate, shortened if need be; None if nothing of it fits into the seconds."""
    left = (seconds - START_SECONDS - END_SECONDS - plan.situation.compile_seconds) / TIME_MARGIN
    tokenizer = candidate.tokenizer
    free = replace(tokenizer, bytes_per_second=math.inf) if tokenizer in prepared else tokenizer
    if plan.situation.corpus.text_bytes / free.bytes_per_second + candidate.training_seconds <= left:
        return candidate
    situation = replace(plan.situation, seconds=left)
    found = pick_share(situation, replace(candidate, tokenizer=free), candidate.step_seconds)
    if found is None or found.training_seconds > left:  # with a number of steps that the user has set
        return None
    return replace(found, tokenizer=tokenizer)
