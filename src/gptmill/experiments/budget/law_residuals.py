"""What the scaling law leaves: runs that are alike end above it together, or below it.

A Gaussian process over the logarithms of losses (Rasmussen and Williams 2006, chapter 2) finds that from all measured
runs. It knows what no sum of powers can say: that models learn to copy from above all at once, which small ones do on
code after a few megabytes and on prose later. Far from every measured run it says nothing, and the law stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptmill.experiments.budget.law_fit import MeasuredRun, list_errors
from gptmill.experiments.budget.scaling_law import BYTE_VOCAB, USUAL_CONTEXT, ScalingLaw

Floats = NDArray[np.float64]

# How far apart runs may be to tell of each other: in the logarithms of weights, data, vocabulary, epochs and context,
# and in density. By benchmarks/scaling.py, which leaves out the runs of each situation in turn.
SCALES: Floats = np.array([3.0, 3.0, 2.0, 2.0, 3.0, 0.3])
LEFT, NOISE = 0.05, 0.01  # standard deviations: of what the law leaves, and of two runs that differ in their seed


@dataclass(frozen=True)
class CorrectedLaw(ScalingLaw):
    """The law, moved to where runs like the one in question have ended."""

    places: Floats
    """Of the measured runs, in units of the scales."""
    pulls: Floats
    """By which each of them moves what is near to it."""

    def predict(
        self,
        weights: float,
        trained_bytes: float,
        unique_bytes: float,
        vocab_size: float,
        density: float,
        pressure: float = 0.0,
        context_bytes: float = USUAL_CONTEXT,
    ) -> float:
        """Bits per byte, as ScalingLaw.predict."""
        text = trained_bytes, unique_bytes, vocab_size, density
        plain = super().predict(weights, *text, pressure, context_bytes)
        place = _find_place(weights, *text, context_bytes)
        return plain * math.exp(float(_measure_likeness(self.places, place) @ self.pulls))


def correct_law(law: ScalingLaw, runs: Sequence[MeasuredRun]) -> CorrectedLaw:
    """The law with what these runs have left of it."""
    places = np.array([_place_run(run) for run in runs])
    likeness = np.stack([_measure_likeness(places, place) for place in places])
    pulls = np.linalg.solve(likeness + NOISE**2 * np.eye(len(runs)), np.array(list_errors(law, runs)))
    return CorrectedLaw(**vars(law), places=places, pulls=pulls)


def _place_run(run: MeasuredRun) -> Floats:
    text = run.trained_bytes, run.unique_bytes, run.vocab_size, run.density
    return _find_place(run.weights, *text, run.context_bytes)


def _find_place(
    weights: float,
    trained_bytes: float,
    unique_bytes: float,
    vocab_size: float,
    density: float,
    context_bytes: float,
) -> Floats:
    epochs = max(1.0, trained_bytes / unique_bytes)
    counts = weights, trained_bytes, vocab_size / BYTE_VOCAB, epochs, context_bytes
    return np.array([*map(math.log, counts), density], dtype=np.float64) / SCALES


def _measure_likeness(places: Floats, place: Floats) -> Floats:
    """The covariance of what the law leaves here and there."""
    distances: Floats = np.square(places - place).sum(axis=-1)
    return LEFT**2 * np.exp(-distances / 2)
