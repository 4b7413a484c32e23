"""The scaling law: what it says of more data, more weights and repetition, and that a fit finds its constants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gptmill.experiments.budget.fitted_law import load_fit, load_law
from gptmill.experiments.budget.law_fit import MeasuredRun, fit_law, list_errors
from gptmill.experiments.budget.scaling_law import DATA_DECAY, ScalingLaw, find_data, find_size

LAW = ScalingLaw(0.4, 9.0, 0.35, 12.0, 0.25, 0.1, spread=0.01)
FAR = 1e30


def predict(law: ScalingLaw = LAW, weights: float = 1e6, trained: float = 1e7, unique: float = 1e8) -> float:
    return law.predict(weights, trained, unique, 1024, 2.0)


@pytest.mark.parametrize("law", [LAW, load_law()], ids=["example", "shipped"])
def test_more_data_more_weights_and_less_repetition_never_hurt(law: ScalingLaw) -> None:
    sizes = [predict(law, weights=10.0**power) for power in range(4, 10)]
    amounts = [predict(law, trained=10.0**power) for power in range(5, 11)]
    unique = [predict(law, unique=10.0**power) for power in range(5, 9)]
    for losses in (sizes, amounts, unique):
        assert losses == sorted(losses, reverse=True)


def test_the_limits_are_the_floor_and_a_loss_in_proportion_to_the_difficulty() -> None:
    assert LAW.predict(FAR, FAR, FAR, 256, 2.0) == pytest.approx(2.0 * LAW.floor)
    assert LAW.predict(1e6, 1e7, 1e8, 256, 3.0) == pytest.approx(1.5 * LAW.predict(1e6, 1e7, 1e8, 256, 2.0))


def test_repeated_text_is_worth_nearly_as_much_as_new_at_first_and_nothing_in_the_end() -> None:
    assert find_data(5e5, 1e6) == 5e5
    assert find_data(4e6, 1e6) == pytest.approx(4e6, rel=0.1)  # up to four epochs, as Muennighoff et al. found
    assert find_data(1e9, 1e6) == pytest.approx((1 + DATA_DECAY) * 1e6)
    assert find_size(1e9, 1e6) < 7e6


def make_runs(law: ScalingLaw) -> list[MeasuredRun]:
    cells = product((1e5, 3e5, 1e6, 5e6), (3e5, 1e6, 5e6, 2e7), (256, 1024, 4096))
    return [
        MeasuredRun(size, trained, 1e8, vocab, 2.0, law.predict(size, trained, 1e8, vocab, 2.0))
        for size, trained, vocab in cells
    ]


def test_a_fit_recovers_the_constants_of_runs_that_follow_the_law() -> None:
    fitted = fit_law(make_runs(LAW))
    assert fitted.size_power == pytest.approx(LAW.size_power, abs=0.01)
    assert fitted.data_power == pytest.approx(LAW.data_power, abs=0.01)
    assert fitted.vocab_power == pytest.approx(LAW.vocab_power, abs=0.01)
    assert fitted.floor == pytest.approx(LAW.floor, abs=0.02)
    assert fitted.spread < 1e-3


def test_a_fit_never_has_a_negative_term() -> None:
    """Without a floor and without an effect of the size, noise must not become a term below zero."""
    law = replace(LAW, floor=0.0, size_factor=0.0)
    noisy = [
        replace(run, bits_per_byte=run.bits_per_byte * (1 + 0.01 * (-1) ** number))
        for number, run in enumerate(make_runs(law))
    ]
    fitted = fit_law(noisy)
    assert min(fitted.floor, fitted.size_factor, fitted.data_factor) >= 0
    assert fitted.spread == pytest.approx(0.01, rel=0.3)


def test_the_shipped_law_is_the_fit_of_the_shipped_runs() -> None:
    content, law = load_fit(), load_law()
    runs = [MeasuredRun(**run["measured"]) for run in content["runs"] if run["is_fitted"]]
    assert fit_law(runs) == law
    assert max(map(abs, list_errors(law, runs))) < 4 * law.spread
