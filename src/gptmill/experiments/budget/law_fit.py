"""Fits the scaling law to measured runs: exponents by a search, and for each choice of them the factors exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from gptmill.experiments.budget.scaling_law import BYTE_VOCAB, ScalingLaw, find_data, find_overfitting, find_size

# Near those that large grids found (Hoffmann et al.: 0.34 and 0.28). A small grid alone would fit a steep power and a
# high floor as well, and then see no use in larger models.
MIN_POWER, MAX_POWER = 0.2, 0.4
SIZE_POWERS = DATA_POWERS = (0.2, 0.25, 0.3, 0.35, 0.4)
VOCAB_POWERS = tuple(-0.4 + 0.2 * number for number in range(6))
FIRST_STEP, ROUNDS = 0.1, 8  # of a finer search around the best exponents
FITTED = 6  # constants

Powers = tuple[float, ...]
"""Exponents of size, data and vocabulary."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run trained on, and the loss that it reached."""

    weights: float
    trained_bytes: float
    unique_bytes: float
    vocab_size: float
    difficulty: float
    bits_per_byte: float


@dataclass(frozen=True)
class _Terms:
    """What the law's terms are computed from, one entry for each run."""

    weights: NDArray[np.float64]
    data: NDArray[np.float64]
    vocab: NDArray[np.float64]
    difficulty: NDArray[np.float64]
    target: NDArray[np.float64]


def fit_law(runs: Sequence[MeasuredRun]) -> ScalingLaw:
    """The law with the smallest relative errors; needs runs of several sizes, data amounts and vocabularies."""
    terms = _Terms(
        np.array([find_size(run.weights, run.unique_bytes) for run in runs]),
        np.array([find_data(run.trained_bytes, run.unique_bytes) for run in runs]),
        np.array([run.vocab_size / BYTE_VOCAB for run in runs]),
        np.array([run.difficulty * find_overfitting(run.weights, run.trained_bytes, run.unique_bytes) for run in runs]),
        np.array([run.bits_per_byte for run in runs]),
    )
    powers = _pick(terms, product(SIZE_POWERS, DATA_POWERS, VOCAB_POWERS))
    step = FIRST_STEP
    for _ in range(ROUNDS):
        moves = product((-step, 0.0, step), repeat=3)
        near = (tuple(power + move for power, move in zip(powers, each, strict=True)) for each in moves)
        powers = _pick(terms, (each for each in near if min(each[:2]) >= MIN_POWER and max(each[:2]) <= MAX_POWER))
        step /= 2
    floor, size_factor, data_factor = _find_factors(terms, powers)
    law = ScalingLaw(floor, size_factor, powers[0], data_factor, powers[1], powers[2], spread=0.0)
    return replace(law, spread=measure_spread(law, runs, FITTED))


def list_errors(law: ScalingLaw, runs: Sequence[MeasuredRun]) -> list[float]:
    """The logarithms of measured over predicted losses."""
    return [
        math.log(
            run.bits_per_byte
            / law.predict(run.weights, run.trained_bytes, run.unique_bytes, run.vocab_size, run.difficulty)
        )
        for run in runs
    ]


def measure_spread(law: ScalingLaw, runs: Sequence[MeasuredRun], fitted: int = 0) -> float:
    """The standard deviation of the errors, with as many degrees of freedom fewer as constants were fitted."""
    squares = sum(error**2 for error in list_errors(law, runs))
    return math.sqrt(squares / max(1, len(runs) - fitted))


def _pick(terms: _Terms, choices: Iterable[Powers]) -> Powers:
    return min((_solve(terms, powers), powers) for powers in choices)[1]


def _solve(terms: _Terms, powers: Powers) -> float:
    """The squared relative error with the best factors."""
    matrix = _make_matrix(terms, powers)
    return float(((matrix @ np.array(_find_factors(terms, powers)) - 1) ** 2).sum())


def _find_factors(terms: _Terms, powers: Powers) -> tuple[float, float, float]:
    """The non-negative factors of the three terms with the least relative errors: few enough to try every subset."""
    matrix, best, best_error = _make_matrix(terms, powers), (0.0, 0.0, 0.0), math.inf
    ones = np.ones(len(terms.target))
    for used in (columns for count in (3, 2, 1) for columns in combinations(range(3), count)):
        found, *_ = np.linalg.lstsq(matrix[:, used], ones)
        if (found < 0).any():
            continue
        error = float(((matrix[:, used] @ found - 1) ** 2).sum())
        if error < best_error - 1e-15:
            factors = [0.0, 0.0, 0.0]
            for column, factor in zip(used, found.tolist(), strict=True):
                factors[column] = factor
            best, best_error = (factors[0], factors[1], factors[2]), error
    return best


def _make_matrix(terms: _Terms, powers: Powers) -> NDArray[np.float64]:
    """The three terms of each run without their factors, relative to its loss."""
    size_power, data_power, vocab_power = powers
    size = terms.weights**-size_power
    data = terms.vocab**vocab_power * terms.data**-data_power
    columns = [np.ones_like(size), size, data]
    return np.stack([terms.difficulty * column / terms.target for column in columns], axis=1)
