"""The scaling law: what it says of more data, more weights and repetition, and that a fit finds its constants."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from itertools import product
from statistics import fmean

import pytest

from gptmill.experiments.budget.fitted_law import load_fit, load_law
from gptmill.experiments.budget.law_fit import MeasuredRun, Powers, fit_law, list_errors, predict_run
from gptmill.experiments.budget.law_residuals import correct_law
from gptmill.experiments.budget.scaling_law import (
    DATA_DECAY,
    FREE_PRESSURE,
    LEAST_DENSITY,
    MOST_DENSITY,
    SIZE_DECAY,
    USUAL_DENSITY,
    WEIGHTS_PER_BYTE,
    ScalingLaw,
    find_context_factor,
    find_data,
    find_overfitting,
    find_pressure,
    find_size,
)

LAW = ScalingLaw(
    floor=0.9, floor_density=1.5, floor_vocab=0.2, size_factor=0.3, size_power=0.35, size_vocab=-0.2, size_density=-0.5,
    data_factor=0.6, data_power=0.25, data_vocab=0.1, data_density=-1.0, spread=0.01,
)  # fmt: skip
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


def test_the_limit_is_the_floor_which_falls_with_the_density() -> None:
    for part in (1.0, 0.8):
        limit = LAW.predict(FAR, FAR, FAR, 256, part * USUAL_DENSITY, context_bytes=FAR)
        assert limit == pytest.approx(part**1.5 * LAW.floor, rel=1e-4)


def test_tokens_of_several_bytes_raise_the_floor_of_text_that_is_easier_than_books() -> None:
    def find_limit(vocab_size: int, density: float) -> float:
        return LAW.predict(FAR, FAR, FAR, vocab_size, density, context_bytes=FAR)

    bytes_, few, many = (find_limit(vocab_size, 0.75 * USUAL_DENSITY) for vocab_size in (256, 1024, 8192))
    assert bytes_ < few < many
    assert few - bytes_ > many - few, "most of it comes with the first tokens"
    assert find_limit(65, 0.75 * USUAL_DENSITY) == pytest.approx(bytes_, rel=1e-4), "smaller tokens are none"
    assert find_limit(8192, USUAL_DENSITY) == pytest.approx(find_limit(256, USUAL_DENSITY), rel=1e-4)


@pytest.mark.parametrize(("known", "beyond"), [(LEAST_DENSITY, 0.1), (MOST_DENSITY, 5.0)])
def test_texts_unlike_all_measured_ones_are_in_proportion_to_the_nearest(known: float, beyond: float) -> None:
    nearest = LAW.predict(1e6, 1e7, 1e8, 256, known)
    assert LAW.predict(1e6, 1e7, 1e8, 256, beyond) == pytest.approx(beyond / known * nearest)


def test_repeated_text_is_worth_nearly_as_much_as_new_at_first_and_nothing_in_the_end() -> None:
    assert find_data(5e5, 1e6, 256, USUAL_DENSITY) == 5e5
    assert find_data(4e6, 1e6, 256, USUAL_DENSITY) == pytest.approx(4e6, rel=0.1)  # as Muennighoff et al. found
    assert find_data(1e9, 1e6, 256, USUAL_DENSITY) == pytest.approx((1 + DATA_DECAY) * 1e6)
    assert find_data(1e7, 1e6, 256, LEAST_DENSITY) < find_data(1e7, 1e6, 256, MOST_DENSITY)
    assert find_data(1e7, 1e6, 8192, USUAL_DENSITY) < find_data(1e7, 1e6, 256, USUAL_DENSITY)
    assert find_size(1e9, 1e6) == pytest.approx((1 + SIZE_DECAY) * WEIGHTS_PER_BYTE * 1e6)


def test_epochs_make_a_model_learn_its_text_by_heart_sooner_than_weights() -> None:
    assert find_pressure(1e9, 1e6, 1e6) == 0, "nothing can be learned by heart in one epoch"
    assert 0 < find_pressure(4e6, 1e7, 1e6) < find_pressure(1e6, 4e7, 1e6)
    assert find_overfitting(FREE_PRESSURE) == 1 < find_overfitting(2 * FREE_PRESSURE) < find_overfitting(1e6)


@pytest.mark.parametrize(("density", "gain"), [(1.76, 0.055), (2.5, 0.009)], ids=["code", "books"])
def test_a_longer_context_is_worth_more_in_text_that_comes_back(density: float, gain: float) -> None:
    short, long = (LAW.predict(1e6, 1e9, 1e9, 256, density, context_bytes=size) for size in (500, 4000))
    assert long / short == pytest.approx(1 - gain, abs=2e-3)
    assert find_context_factor(4000, 1e5, density) < find_context_factor(4000, 1e9, density), "it is used late"


def make_runs(law: ScalingLaw) -> list[MeasuredRun]:
    cells = product((1e5, 3e5, 1e6, 5e6), (3e5, 1e6, 5e6, 2e7), (256, 1024, 4096), (1.8, 2.2, 2.6))
    return [
        MeasuredRun(size, trained, 1e8, vocab, density, law.predict(size, trained, 1e8, vocab, density))
        for size, trained, vocab, density in cells
    ]


def test_a_fit_recovers_the_constants_of_runs_that_follow_the_law() -> None:
    fitted = fit_law(make_runs(LAW))
    for name in Powers._fields:
        assert getattr(fitted, name) == pytest.approx(getattr(LAW, name), abs=0.1), name
    assert fitted.floor == pytest.approx(LAW.floor, abs=0.05)
    assert fitted.spread < 2e-3


def test_a_fit_follows_the_runs_that_weigh_more() -> None:
    runs = make_runs(LAW)[::3]
    others = [replace(run, bits_per_byte=1.1 * run.bits_per_byte, weight=1e-4) for run in runs]
    assert max(map(abs, list_errors(fit_law([*runs, *others]), runs))) < 0.01


def test_a_fit_never_has_a_negative_term() -> None:
    """Without a floor and without an effect of the size, noise must not become a term below zero."""
    law = replace(LAW, floor=0.0, size_factor=0.0)
    noisy = [
        replace(run, bits_per_byte=run.bits_per_byte * (1 + 0.01 * random.Random(number).choice((-1, 1))))
        for number, run in enumerate(make_runs(law)[::3])
    ]
    fitted = fit_law(noisy)
    assert min(fitted.floor, fitted.size_factor, fitted.data_factor) >= 0
    assert fitted.spread == pytest.approx(0.01, rel=0.3)


def test_the_shipped_law_is_the_fit_of_the_shipped_runs() -> None:
    law, runs = ScalingLaw(**load_fit()["law"][0]), list(read_shipped_runs().values())
    refitted = fit_law(runs)
    for name, value in asdict(law).items():
        assert getattr(refitted, name) == pytest.approx(value, abs=1e-6), name
    assert max(map(abs, list_errors(law, runs))) < 4 * law.spread
    assert fmean(map(abs, list_errors(load_law(), runs))) < 0.5 * fmean(map(abs, list_errors(law, runs)))


def test_what_the_law_leaves_moves_it_near_to_the_runs_that_show_it() -> None:
    def make_run(weights: float, excess: float) -> MeasuredRun:
        loss = math.exp(excess) * LAW.predict(weights, 1e7, 1e7, 1024, 2.5)
        return MeasuredRun(weights, 1e7, 1e7, 1024, 2.5, loss)

    def measure_move(runs: list[MeasuredRun], weights: float) -> float:
        moved = predict_run(correct_law(LAW, runs), make_run(weights, 0.0))
        return math.log(moved / predict_run(LAW, make_run(weights, 0.0)))

    above = [make_run(size, 0.03) for size in (8e5, 1e6, 1.2e6)]
    assert measure_move(above, 1e6) == pytest.approx(0.03, abs=4e-3)
    assert 0 < measure_move(above, 1e7) < 0.025
    assert measure_move(above, 1e12) == pytest.approx(0.0, abs=1e-6), "where nothing was measured, the law stands"
    assert 0.5 < measure_move(above[:1], 8e5) / 0.03 < 0.98, "a single run may be luck"
    both = [make_run(1e6, 0.03), make_run(1e6, -0.03)]
    assert measure_move(both, 1e6) == pytest.approx(0.0, abs=1e-6)


def test_of_runs_with_the_same_time_the_law_picks_one_that_is_hardly_worse_than_the_best() -> None:
    """Even where it knows all other runs alone."""
    law, runs = ScalingLaw(**load_fit()["law"][0]), read_shipped_runs()
    rivals: dict[str, list[str]] = {}
    for result in load_fit()["results"]:
        if result["name"] in runs and "situation" in result:
            rivals.setdefault(result["situation"], []).append(result["name"])
    behind = {}
    for situation, names in rivals.items():
        if len(names) > 1:
            corrected = correct_law(law, [run for name, run in runs.items() if name not in names])
            pick = min((runs[name] for name in names), key=lambda run: predict_run(corrected, run))
            behind[situation] = pick.bits_per_byte / min(runs[name].bits_per_byte for name in names)
    assert len(behind) >= 30
    assert max(behind.values()) <= 1.012, behind
    assert fmean(behind.values()) <= 1.002


def read_shipped_runs() -> dict[str, MeasuredRun]:
    return {run["name"]: MeasuredRun(**run["measured"]) for run in load_fit()["runs"]}
