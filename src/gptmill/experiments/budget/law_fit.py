"""Fits the scaling law to measured runs: exponents by a search, and for each choice of them the factors exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptmill.experiments.budget.scaling_law import (
    BYTE_VOCAB,
    DATA_OFFSET,
    USUAL_CONTEXT,
    USUAL_DENSITY,
    ScalingLaw,
    find_coarseness,
    find_context_factor,
    find_data,
    find_overfitting,
    find_size,
)

# Large grids found 0.34 and 0.28 (Hoffmann et al.). A grid of few sizes would fit a far steeper power and a high floor
# as well, and then see no use in larger models.
MIN_POWER, MAX_POWER = 0.2, 0.6
STARTS = (0.25, 0.4)  # of both powers
STEPS = tuple(0.4 / 2**number for number in range(9))  # of a search along each exponent in turn
ROUNDS = 60  # at most, with each step
FITTED = 11  # constants

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredRun:
    """What a run trained on, and the loss that it reached."""

    weights: float
    trained_bytes: float
    unique_bytes: float
    vocab_size: float
    density: float
    bits_per_byte: float
    pressure: float = 0.0
    """To learn its text by heart."""
    context_bytes: float = USUAL_CONTEXT
    weight: float = 1.0
    """In a fit, of its squared error."""


class Powers(NamedTuple):
    """The law's exponents."""

    size_power: float
    data_power: float
    size_vocab: float = 0.0
    data_vocab: float = 0.0
    floor_density: float = 1.0
    size_density: float = 0.0
    data_density: float = 0.0
    floor_vocab: float = 0.0


@dataclass(frozen=True)
class _Terms:
    """What the law's terms are computed from, one entry for each run."""

    size: Floats
    data: Floats
    vocab: Floats
    density: Floats
    coarseness: Floats
    target: Floats
    """The loss with a boundless context and without overfitting."""
    weight: Floats
    """Of the error, not of its square."""


def fit_law(runs: Sequence[MeasuredRun]) -> ScalingLaw:
    """The law with the smallest relative errors; needs runs of several sizes, data amounts, vocabularies and texts."""
    terms = _Terms(
        np.array([find_size(run.weights, run.unique_bytes) / 1e6 for run in runs]),
        np.array([_count_data(run) / 1e6 for run in runs]),
        np.array([run.vocab_size / BYTE_VOCAB for run in runs]),
        np.array([run.density / USUAL_DENSITY for run in runs]),
        np.array([find_coarseness(run.vocab_size / BYTE_VOCAB, run.density) for run in runs]),
        np.array([run.bits_per_byte / _find_factor(run) for run in runs]),
        np.array([math.sqrt(run.weight) for run in runs]),
    )
    starts = [_descend(terms, Powers(*powers)) for powers in product(STARTS, repeat=2)]
    powers = min(starts, key=lambda each: _measure_misfit(terms, each))
    floor, size_factor, data_factor = _find_factors(terms, powers)
    law = ScalingLaw(
        floor=floor, size_factor=size_factor, data_factor=data_factor, spread=0.0, **powers._asdict()
    )  # fmt: skip
    return replace(law, spread=measure_spread(law, runs, FITTED))


def list_errors(law: ScalingLaw, runs: Sequence[MeasuredRun]) -> list[float]:
    """The logarithms of measured over predicted losses."""
    return [math.log(run.bits_per_byte / predict_run(law, run)) for run in runs]


def predict_run(law: ScalingLaw, run: MeasuredRun) -> float:
    text = run.trained_bytes, run.unique_bytes
    return law.predict(run.weights, *text, run.vocab_size, run.density, run.pressure, run.context_bytes)


def measure_spread(law: ScalingLaw, runs: Sequence[MeasuredRun], fitted: int = 0) -> float:
    """The standard deviation of the errors, with as many degrees of freedom fewer as constants were fitted."""
    squares = sum(error**2 for error in list_errors(law, runs))
    return math.sqrt(squares / max(1, len(runs) - fitted))


def _find_factor(run: MeasuredRun) -> float:
    """What the sum of the law's terms is multiplied by."""
    context_factor = find_context_factor(run.context_bytes, run.trained_bytes, run.density)
    return find_overfitting(run.pressure) * context_factor


def _count_data(run: MeasuredRun) -> float:
    return DATA_OFFSET + find_data(run.trained_bytes, run.unique_bytes, run.vocab_size, run.density)


def _descend(terms: _Terms, powers: Powers) -> Powers:
    """Moves one exponent at a time as long as that lowers the error, in ever smaller steps."""
    best = _measure_misfit(terms, powers)
    for step in STEPS:
        for _ in range(ROUNDS):
            before = best
            for name, move in product(Powers._fields, (-step, step)):
                moved = powers._replace(**{name: getattr(powers, name) + move})
                if not (min(moved[:2]) >= MIN_POWER and max(moved[:2]) <= MAX_POWER):
                    continue
                if (error := _measure_misfit(terms, moved)) < best:
                    best, powers = error, moved
            if best == before:
                break
    return powers


def _measure_misfit(terms: _Terms, powers: Powers) -> float:
    """The squared relative error with the best factors."""
    matrix = _make_matrix(terms, powers)
    return float(((matrix @ np.array(_find_factors(terms, powers)) - terms.weight) ** 2).sum())


def _find_factors(terms: _Terms, powers: Powers) -> tuple[float, float, float]:
    """The non-negative factors of the three terms with the least relative errors: few enough to try every subset."""
    matrix, best, best_error = _make_matrix(terms, powers), (0.0, 0.0, 0.0), math.inf
    for used in (columns for count in (3, 2, 1) for columns in combinations(range(3), count)):
        found, *_ = np.linalg.lstsq(matrix[:, used], terms.weight)
        if (found < 0).any():
            continue
        error = float(((matrix[:, used] @ found - terms.weight) ** 2).sum())
        if error < best_error - 1e-15:
            factors = [0.0, 0.0, 0.0]
            for column, factor in zip(used, found.tolist(), strict=True):
                factors[column] = factor
            best, best_error = (factors[0], factors[1], factors[2]), error
        if len(used) == matrix.shape[1]:
            break  # without a bound in the way, nothing is better
    return best


def _make_matrix(terms: _Terms, powers: Powers) -> Floats:
    """The three terms of each run without their factors, relative to its loss and times its weight."""
    floor = terms.density**powers.floor_density * np.exp(powers.floor_vocab * terms.coarseness)
    size = terms.density**powers.size_density * terms.vocab**powers.size_vocab * terms.size**-powers.size_power
    data = terms.density**powers.data_density * terms.vocab**powers.data_vocab * terms.data**-powers.data_power
    return np.stack([floor, size, data], axis=1) * (terms.weight / terms.target)[:, None]
