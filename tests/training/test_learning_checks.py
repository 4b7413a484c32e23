"""Checks of what the model learns: they see a real change, and stay silent in noise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from steps import make_noise, make_step, show

from gptmill.runs.events import EvalDone, Event, StepLogged
from gptmill.training.learning_checks import GradNormCheck, OverfittingCheck, PlateauCheck


def make_norms(levels: list[tuple[float, int]], spread: float = 0.3) -> list[StepLogged]:
    noise, norms = make_noise(), [level for level, steps in levels for _ in range(steps)]
    return [make_step(step, grad_norm=norm * math.exp(noise.gauss(0, spread))) for step, norm in enumerate(norms, 1)]


def test_a_gradient_norm_that_rises_and_stays_is_told_once() -> None:
    (warning,) = show(GradNormCheck(None, 5.0, 10), make_norms([(0.5, 300), (4.0, 300)]))
    assert warning.about == "grad_norm"
    assert 305 < warning.step < 330
    assert "6.0 times its usual 0.492" in warning.message
    assert "lower --max_lr" in warning.message


def test_a_gradient_norm_above_the_fixed_limit_is_told() -> None:
    (warning,) = show(GradNormCheck(5.0, None, 10), make_norms([(7.0, 100)]))
    assert "above the limit of 5;" in warning.message
    assert warning.step < 40


@pytest.mark.parametrize(
    "levels",
    [
        [(0.5, 600)],
        [(40.0, 50), (0.5, 400)],
        [(0.5, 200), (8.0, 8), (0.5, 200)],
        [(1.0, 200), (2.4, 200), (0.8, 200)],
        [(0.5, 100), (math.nan, 30), (0.5, 100), (math.inf, 30)],
    ],
    ids=["noise", "warm-up", "short spike", "slow rise", "not finite"],
)
def test_usual_gradient_norms_are_no_reason_to_warn(levels: list[tuple[float, int]]) -> None:
    assert show(GradNormCheck(5.0, 5.0, 50), make_norms(levels)) == []


def make_losses(steps: int, level_off_at: float, noise: float, log_freq: int = 1) -> Iterator[StepLogged]:
    """A power law of the step, flat from some step on."""
    generator = make_noise(3)
    for step in range(1, steps + 1):
        loss = 1.5 + 6 * min(step, level_off_at) ** -0.3 + generator.gauss(0, noise)
        if step % log_freq == 0:
            yield make_step(step, loss=loss)


@pytest.mark.parametrize(("noise", "log_freq"), [(0.0, 1), (0.03, 1), (0.03, 10), (0.03, 100)])
def test_a_loss_that_levels_off_is_told_once(noise: float, log_freq: int) -> None:
    check = PlateauCheck(500, 5000, 1e-3)
    (warning,) = show(check, make_losses(5000, 1500, noise, log_freq))
    assert warning.about == "plateau"
    assert 2000 <= warning.step < 4000
    assert "has not improved over" in warning.message


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("steps", [300, 1200, 8000])
def test_a_loss_that_still_falls_is_no_plateau_however_noisy(steps: int, noise: float) -> None:
    assert show(PlateauCheck(500, steps, 1e-3), make_losses(steps, math.inf, noise)) == []


def test_at_the_end_of_the_decay_every_loss_levels_off() -> None:
    steps = [
        make_step(step, loss=3 - 0.0005 * min(step, 2000), lr=1e-3 if step < 2000 else 2e-4) for step in range(5000)
    ]
    assert show(PlateauCheck(500, 5000, 1e-3), steps) == []


def make_evals(pairs: list[tuple[float, float]]) -> list[Event]:
    """For each pair, ten steps with this training loss, and an evaluation with this validation loss."""
    events: list[Event] = []
    for number, (train, val) in enumerate([pairs[0], *pairs]):  # the first steps are not seen
        events += [make_step(10 * number + step, loss=train) for step in range(1, 11)]
        events.append(EvalDone(10 * number + 10, val, 64, 0.1, time=1e6 + 20 * number + 20.5))
    return events


def test_a_validation_loss_that_rises_while_training_improves_is_told_once() -> None:
    pairs = [(3.0, 3.1), (2.5, 2.7), (2.0, 2.6), (1.8, 2.7), (1.6, 2.8), (1.4, 2.9), (1.2, 3.0), (1.0, 3.1)]
    (warning,) = show(OverfittingCheck(0.02), make_evals(pairs))
    assert (warning.about, warning.step) == ("overfitting", 70)
    assert "2.9000 is 11.5% above its best (2.6000 at step 40)" in warning.message
    assert "fell from 2.0000 to 1.4000" in warning.message


@pytest.mark.parametrize(
    "pairs",
    [
        [(3.0 - 0.1 * n, 3.1 - 0.1 * n) for n in range(10)],
        [(2.0 - 0.01 * n, 2.5 + 0.02 * (n % 2)) for n in range(10)],
        [(2.0 + 0.1 * n, 2.1 + 0.1 * n) for n in range(10)],
        [(2.0, 2.5), (1.9, 2.7), (1.8, 2.7), (1.7, 2.5), (1.6, 2.7), (1.5, 2.4)],
    ],
    ids=["both fall", "validation is noisy", "both rise", "two bad evaluations"],
)
def test_other_validation_losses_are_not_overfitting(pairs: list[tuple[float, float]]) -> None:
    assert show(OverfittingCheck(0.02), make_evals(pairs)) == []
