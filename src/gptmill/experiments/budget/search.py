"""Measures candidates, those that seem best first, until the best of all is one that was measured.

A machine that others use is slower for moments, and not for all candidates alike. So they take turns, and of each the
fastest counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from gptmill.config.errors import UserError
from gptmill.experiments.budget.candidate import Candidate
from gptmill.experiments.budget.choice import Situation, make_time_error, pick_share, rank

LEAST_MEASURED, MOST_MEASURED = 3, 6
# Measurements of each that may be the best. A GPU is steady, and to build a model there takes longer than its steps.
CPU_TURNS, GPU_TURNS = 3, 1
SECOND_CHANCE = 2  # of those that seem to be out of the question: the machine may have been busy for a moment
HOPELESS = 1.03  # times the best loss
# Times it, too: a difference that the law does not know. Of the runs in law.json that had the same time, the smallest
# of those that it expects so near to the best were as good as the one that it prefers.
AS_GOOD = 1.002
TOO_LARGE = (
    "no model that the options allow fits into this device's memory; ask for a smaller one, or fix fewer options"
)


def measure_best(
    situation: Situation, expected: Sequence[Candidate], measure: Callable[[Candidate], float], turns: int
) -> dict[int, float]:
    """The step times of the candidates that may be the best, by their number in `expected`."""
    seconds: dict[int, list[float]] = {}
    while (number := _pick_next(situation, expected, seconds, turns)) is not None:
        seconds.setdefault(number, []).append(measure(expected[number]))
    return _find_usual(seconds)


def correct(situation: Situation, expected: Sequence[Candidate], measured: Mapping[int, float]) -> list[Candidate]:
    """The candidates anew, the best first, now that the step times of some are measured.

    What was measured comes first, if any of it fits, and of those that are as good as the best the smallest model,
    since it is the fastest to use; the others follow, ranked among themselves.
    """
    corrected = _correct_all(situation, expected, measured)
    known = [each for number, each in corrected.items() if number in measured]
    others = [each for number, each in corrected.items() if number not in measured]
    if not corrected:
        if measured and all(map(math.isinf, measured.values())):
            raise UserError(TOO_LARGE)
        raise make_time_error(situation)
    return [*_put_small_first(rank(known)), *rank(others)]


def _put_small_first(ranked: list[Candidate]) -> list[Candidate]:
    good = [each for each in ranked if each.bits_per_byte <= AS_GOOD * ranked[0].bits_per_byte]
    return [*sorted(good, key=lambda each: each.shape.block_weights), *ranked[len(good) :]]


def _pick_next(
    situation: Situation, expected: Sequence[Candidate], seconds: Mapping[int, list[float]], turns: int
) -> int | None:
    """The number of the candidate to measure now: a new one, or one whose turn it is again; None if all is known."""
    corrected = _correct_all(situation, expected, _find_usual(seconds))
    order = sorted(corrected, key=lambda number: corrected[number].bits_per_byte) or list(range(len(expected)))
    new = [number for number in order if number not in seconds]
    is_best_known = len(seconds) >= LEAST_MEASURED and order[0] in seconds
    if new and len(seconds) < MOST_MEASURED and not is_best_known:
        return new[0]
    limit = HOPELESS * min((each.bits_per_byte for each in corrected.values()), default=0.0)
    least = min(turns, SECOND_CHANCE) if corrected else SECOND_CHANCE

    def count_turns(number: int) -> int:
        return turns if number in corrected and corrected[number].bits_per_byte <= limit else least

    fitting = [number for number in seconds if math.isfinite(seconds[number][0])]
    due = [number for number in fitting if len(seconds[number]) < count_turns(number)]
    return min(due, key=lambda number: len(seconds[number]), default=None)


def _find_usual(seconds: Mapping[int, list[float]]) -> dict[int, float]:
    """The fastest of each, times by how much a measurement usually is slower than that."""
    fastest = {number: min(found) for number, found in seconds.items()}
    slower = [each / fastest[number] for number, found in seconds.items() for each in found if math.isfinite(each)]
    usual = statistics.median_low(slower) if slower else 1.0
    return {number: usual * found for number, found in fastest.items()}


def _correct_all(
    situation: Situation, expected: Sequence[Candidate], measured: Mapping[int, float]
) -> dict[int, Candidate]:
    """By number, without those that do not fit into the time or into memory.

    What was not measured is taken to be as much slower or faster than expected as the others were.
    """
    factors = [seconds / expected[number].step_seconds for number, seconds in measured.items()]
    typical = statistics.median([factor for factor in factors if math.isfinite(factor)] or [1.0])
    found = {
        number: pick_share(situation, each, measured.get(number, typical * each.step_seconds))
        for number, each in enumerate(expected)
    }
    return {number: each for number, each in found.items() if each is not None}
