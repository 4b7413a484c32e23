"""The learning rate: linear warm-up, then one of four courses, and the corners between them."""

from __future__ import annotations

import math
from itertools import product

import pytest

from gptmill.config.optimizer import Constant, Cosine, Linear, OptimizerConfig, Wsd
from gptmill.training.schedules import make_lr

CLASSIC = OptimizerConfig(max_lr=6e-4, schedule=Cosine(6e-5), warmup_steps=715)
CLASSIC_STEPS = 95_365


def compute_by_hand(step: int, config: OptimizerConfig, max_steps: int) -> float:
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    ratio = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    assert isinstance(config.schedule, Cosine)
    min_lr = config.schedule.min_lr
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (config.max_lr - min_lr)


def test_the_rate_follows_the_formula_to_the_last_bit() -> None:
    for step in (0, 1, 100, 713, 714, 715, 716, *range(1000, 95_364, 97), 95_364):
        assert make_lr(step, CLASSIC, CLASSIC_STEPS) == compute_by_hand(step, CLASSIC, CLASSIC_STEPS), step


def test_the_rates_of_the_classic_run() -> None:
    rates = {0: 8.39e-7, 356: 2.996e-4, 714: 6e-4, 715: 6e-4, 48_040: 3.3e-4, 95_364: 6e-5}
    assert {step: make_lr(step, CLASSIC, CLASSIC_STEPS) for step in rates} == pytest.approx(rates, rel=1e-3)


def test_the_rate_rises_to_the_end_of_the_warm_up_and_falls_after() -> None:
    config = OptimizerConfig(max_lr=1.0, schedule=Cosine(0.1), warmup_steps=10)
    rates = [make_lr(step, config, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert all(0.1 < rate <= 1.0 for rate in rates[9:])
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("step", [95_365, 95_366, 10**9])
def test_after_the_end_the_rate_stays_at_its_lowest(step: int) -> None:
    assert make_lr(step, CLASSIC, CLASSIC_STEPS) == 6e-5


def test_without_warm_up_the_first_rate_is_the_highest() -> None:
    config = OptimizerConfig(max_lr=1.0, schedule=Cosine(0.0), warmup_steps=0)
    assert [make_lr(step, config, 4) for step in range(4)] == pytest.approx(
        [1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4]
    )


@pytest.mark.parametrize("max_steps", [1, 9, 10])
def test_a_warm_up_as_long_as_the_run_or_longer_only_rises(max_steps: int) -> None:
    config = OptimizerConfig(max_lr=1.0, schedule=Cosine(0.1), warmup_steps=10)
    rates = [make_lr(step, config, max_steps) for step in range(max_steps)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(max_steps)])


def test_a_run_of_one_step_has_a_rate() -> None:
    assert make_lr(0, OptimizerConfig(max_lr=1.0, schedule=Cosine(0.1), warmup_steps=0), 1) == 1.0


def list_rates(schedule: Cosine | Linear | Wsd | Constant, warmup_steps: int, max_steps: int) -> list[float]:
    config = OptimizerConfig(max_lr=1.0, schedule=schedule, warmup_steps=warmup_steps)
    return [make_lr(step, config, max_steps) for step in range(max_steps)]


def test_linear_is_a_straight_line() -> None:
    rates = list_rates(Linear(0.1), 10, 100)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[10:] == pytest.approx([1 - 0.9 * step / 90 for step in range(1, 91)])


def test_wsd_is_stable_and_decays_at_the_end() -> None:
    rates = list_rates(Wsd(0.1, decay_fraction=0.2), 10, 100)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[10:80] == [1.0] * 70
    assert rates[80:] == pytest.approx([1 - 0.9 * step / 20 for step in range(1, 21)])


def test_wsd_without_a_stable_stretch_decays_from_the_peak_of_warm_up() -> None:
    rates = list_rates(Wsd(0.1, decay_fraction=0.5), 80, 100)
    assert rates[79] == 1.0
    assert rates[80:] == pytest.approx([1 - 0.9 * step / 20 for step in range(1, 21)])
    assert max(rates) == 1.0


@pytest.mark.parametrize("schedule", [Linear(1e-4), Wsd(1e-4), Wsd(1e-4, 0.02), Wsd(1e-4, 0.9)], ids=repr)
@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 99])
def test_the_last_update_is_at_min_lr(schedule: Linear | Wsd, warmup_steps: int) -> None:
    config = OptimizerConfig(max_lr=1e-3, schedule=schedule, warmup_steps=warmup_steps)
    rates = [make_lr(step, config, 100) for step in range(100)]
    assert rates[-1] == 1e-4
    assert max(rates) == 1e-3
    assert min(rates[max(warmup_steps, 1) : -1], default=1.0) > 1e-4


def test_the_last_cosine_update_is_at_min_lr_to_three_digits_after_a_hundred_steps() -> None:
    config = OptimizerConfig(max_lr=1e-3, schedule=Cosine(1e-4), warmup_steps=10)
    assert make_lr(109, config, 110) == pytest.approx(1e-4, rel=3e-3)


@pytest.mark.parametrize("schedule", [Linear(0.1), Cosine(0.1), Constant()], ids=repr)
def test_the_only_update_of_a_run_is_at_max_lr(schedule: Cosine | Linear | Constant) -> None:
    assert list_rates(schedule, 0, 1) == [1.0]


def test_constant_stays() -> None:
    assert list_rates(Constant(), 4, 100) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 96
    assert make_lr(10**9, OptimizerConfig(max_lr=1.0, schedule=Constant()), 100) == 1.0


EVERY = [Cosine(0.1), Linear(0.1), Wsd(0.1, 0.2), Wsd(0.1, 0.001), Wsd(0.1, 0.999), Constant()]


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_every_rate_is_within_bounds(schedule: Cosine | Linear | Wsd | Constant) -> None:
    for warmup_steps, max_steps in product([0, 1, 7, 20, 21], [1, 2, 20]):
        rates = list_rates(schedule, warmup_steps, max_steps)
        case = f"warmup_steps {warmup_steps}, max_steps {max_steps}: {rates}"
        assert all(0 < rate <= 1.0 for rate in rates), case
        assert all(rate >= 0.1 for rate in rates[warmup_steps:]), case
        assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True), case


@pytest.mark.parametrize("schedule", EVERY[:-1], ids=repr)
def test_past_the_end_every_rate_but_the_constant_one_is_the_lowest(schedule: Cosine | Linear | Wsd) -> None:
    config = OptimizerConfig(max_lr=1.0, schedule=schedule, warmup_steps=5)
    assert [make_lr(step, config, 50) for step in (50, 51, 10**9)] == [0.1] * 3
