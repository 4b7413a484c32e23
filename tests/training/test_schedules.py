"""The learning rate: linear warm-up, cosine decay, and the corners between them."""

from __future__ import annotations

import math

import pytest

from gptmill.config.run import OptimizerConfig
from gptmill.training.schedules import make_lr

CLASSIC = OptimizerConfig(max_lr=6e-4, min_lr=6e-5, warmup_steps=715)
CLASSIC_STEPS = 95_365


def compute_by_hand(step: int, config: OptimizerConfig, max_steps: int) -> float:
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    ratio = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (config.max_lr - config.min_lr)


@pytest.mark.parametrize("step", [0, 1, 100, 713, 714, 715, 716, 1000, 48_040, 95_000, 95_364])
def test_the_rate_follows_the_formula(step: int) -> None:
    assert make_lr(step, CLASSIC, CLASSIC_STEPS) == pytest.approx(compute_by_hand(step, CLASSIC, CLASSIC_STEPS), 1e-12)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 8.39e-7), (356, 2.996e-4), (714, 6e-4), (715, 6e-4), (48_040, 3.3e-4), (95_364, 6e-5)]
)
def test_the_rates_of_the_classic_run(step: int, rate: float) -> None:
    assert make_lr(step, CLASSIC, CLASSIC_STEPS) == pytest.approx(rate, rel=1e-3)


def test_the_rate_rises_to_the_end_of_the_warm_up_and_falls_after() -> None:
    config = OptimizerConfig(max_lr=1.0, min_lr=0.1, warmup_steps=10)
    rates = [make_lr(step, config, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert all(0.1 < rate <= 1.0 for rate in rates[9:])
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("step", [95_365, 95_366, 10**9])
def test_after_the_end_the_rate_stays_at_its_lowest(step: int) -> None:
    assert make_lr(step, CLASSIC, CLASSIC_STEPS) == 6e-5


def test_without_warm_up_the_first_rate_is_the_highest() -> None:
    config = OptimizerConfig(max_lr=1.0, min_lr=0.0, warmup_steps=0)
    assert [make_lr(step, config, 4) for step in range(4)] == pytest.approx(
        [1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4]
    )


@pytest.mark.parametrize("max_steps", [1, 9, 10])
def test_a_warm_up_as_long_as_the_run_or_longer_only_rises(max_steps: int) -> None:
    config = OptimizerConfig(max_lr=1.0, min_lr=0.1, warmup_steps=10)
    rates = [make_lr(step, config, max_steps) for step in range(max_steps)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(max_steps)])


def test_a_run_of_one_step_has_a_rate() -> None:
    assert make_lr(0, OptimizerConfig(max_lr=1.0, min_lr=0.1, warmup_steps=0), 1) == 1.0
