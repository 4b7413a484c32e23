"""Measures candidates, those that seem best first, until the best of all is one that was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from gptmill.config.errors import UserError
from gptmill.experiments.budget.candidate import Candidate
from gptmill.experiments.budget.choice import Situation, make_time_error, pick_share, rank

LEAST_MEASURED, MOST_MEASURED = 3, 6
TOO_LARGE = (
    "no model that the options allow fits into this device's memory; ask for a smaller one, or fix fewer options"
)


def measure_best(
    situation: Situation, expected: Sequence[Candidate], measure: Callable[[Candidate], float]
) -> dict[int, float]:
    """The step times of the candidates that may be the best, by their number in `expected`."""
    measured: dict[int, float] = {}
    while len(measured) < MOST_MEASURED:
        corrected = _correct_all(situation, expected, measured)
        order = sorted(corrected, key=lambda number: corrected[number].bits_per_byte) or range(len(expected))
        left = [number for number in order if number not in measured]
        if not left or (len(measured) >= LEAST_MEASURED and order[0] in measured):
            break
        measured[left[0]] = measure(expected[left[0]])
    if not _correct_all(situation, expected, measured):  # a machine that is busy for a moment looks slow
        return {number: min(seconds, measure(expected[number])) for number, seconds in measured.items()}
    return measured


def correct(situation: Situation, expected: Sequence[Candidate], measured: Mapping[int, float]) -> list[Candidate]:
    """The candidates anew, the best first, now that the step times of some are measured.

    What was measured comes first, if any of it fits; the others follow, ranked among themselves.
    """
    corrected = _correct_all(situation, expected, measured)
    known = [each for number, each in corrected.items() if number in measured]
    others = [each for number, each in corrected.items() if number not in measured]
    if not corrected:
        if measured and all(map(math.isinf, measured.values())):
            raise UserError(TOO_LARGE)
        raise make_time_error(situation)
    return [*rank(known), *rank(others)]


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
