"""What a budget chooses, on frozen measurements of a machine and a corpus."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.errors import UserError
from gptmill.config.recipes import layer_config
from gptmill.config.validation import check_config
from gptmill.experiments.budget import compile_choice
from gptmill.experiments.budget.candidate import (
    CONTEXTS,
    Candidate,
    CorpusFacts,
    TokenizerOption,
    choose_batch,
    choose_dropout,
    find_longest_context,
)
from gptmill.experiments.budget.choice import BATCHES, Situation, choose, find_most_steps
from gptmill.experiments.budget.compile_choice import COMPILE_SECONDS, SPEEDUP, compile_if_it_pays
from gptmill.experiments.budget.corpus_sample import Sample
from gptmill.experiments.budget.explanation import _explain_steps
from gptmill.experiments.budget.fitted_law import load_fit
from gptmill.experiments.budget.learning_rates import choose_rates
from gptmill.experiments.budget.planning import END_SECONDS, START_SECONDS, BudgetPlan
from gptmill.experiments.budget.rivals import Trained, choose_rival, list_first_rivals
from gptmill.experiments.budget.scaling_law import ScalingLaw
from gptmill.experiments.budget.search import (
    AS_GOOD,
    CPU_TURNS,
    GPU_TURNS,
    LEAST_MEASURED,
    MOST_MEASURED,
    correct,
    measure_best,
)
from gptmill.experiments.budget.speed_model import MeasuredStep, make_speed_model
from gptmill.runtime.toolchain import Obstacle

STEPS = (
    MeasuredStep(1024, 1.2e6, 0.035, 0.002),
    MeasuredStep(1024, 6.5e6, 0.15, 0.01),
    MeasuredStep(1024, 33e6, 0.7, 0.1),
)
CPU = make_speed_model(STEPS)
LAW = ScalingLaw(**load_fit()["law"][0])
BOOKS = CorpusFacts(165_000_000, 2.5)
PLAYS = CorpusFacts(1_115_394, 2.63)
TOKENIZERS = (
    TokenizerOption("byte", 257, 1.0, 1e9),
    TokenizerOption("bpe-1024", 1024, 2.6, 2e6),
    TokenizerOption("bpe-4096", 4096, 3.5, 2e6),
)


def make_situation(seconds: float = 60.0, corpus: CorpusFacts = BOOKS, **given: Any) -> Situation:
    return Situation(LAW, CPU, corpus, TOKENIZERS, seconds, given)


def scale(step: MeasuredStep, factor: float) -> MeasuredStep:
    return replace(step, seconds=factor * step.seconds, update_seconds=factor * step.update_seconds)


def pick(situation: Situation) -> Candidate:
    return choose(situation)[0]


@pytest.mark.parametrize("corpus", [BOOKS, PLAYS], ids=["books", "plays"])
def test_more_time_never_promises_a_worse_model(corpus: CorpusFacts) -> None:
    found = [pick(make_situation(seconds, corpus)) for seconds in (20, 60, 240, 900, 3600)]
    losses = [candidate.bits_per_byte for candidate in found]
    assert losses == sorted(losses, reverse=True)
    assert found[-1].shape.block_weights > found[0].shape.block_weights


def test_what_is_chosen_fits_into_the_time() -> None:
    for candidate in choose(make_situation(120)):
        preparing = candidate.unique_bytes / candidate.tokenizer.bytes_per_second
        assert candidate.steps * candidate.step_seconds + preparing <= 120


def test_a_tiny_corpus_gets_a_small_model_and_dropout() -> None:
    tiny, large = (pick(make_situation(3600, corpus)) for corpus in (CorpusFacts(50_000, 2.8), BOOKS))
    assert tiny.shape.block_weights < large.shape.block_weights
    assert tiny.epochs > 4
    assert tiny.dropout > 0
    assert large.dropout == 0


def test_dropout_starts_before_five_epochs_and_grows_with_weights_and_epochs() -> None:
    size, text = 3.55, 280_000  # Shakespeare with BPE of 4,096, where these were among the best
    measured = ((6.5e6, 4), (0.73e6, 4.9), (1.3e6, 7), (1.3e6, 29))
    found = [choose_dropout(weights, epochs * text, size * text, size) for weights, epochs in measured]
    assert found == [0.0, 0.05, 0.1, 0.25]
    assert choose_dropout(1e9, 1000 * text, size * text, size) == 0.4


def test_bytes_need_and_bear_less_dropout() -> None:
    assert choose_dropout(11e6, 5.2e6, 1e6, 1.0) == 0.05, "not at once 0.2, which ended 3 % above the law"
    assert choose_dropout(25e6, 6.9e6, 0.95e6, 1.0) == 0.1, "as good as the law says"
    assert choose_dropout(85e6, 104e6, 9.75e6, 1.0) == 0.15, "not 0.25, which ended 5 % above the law"
    assert choose_dropout(25e6, 304e6, 9.75e6, 1.0) == 0.15, "the best of Python's library on an H200"


def test_a_long_run_of_text_that_comes_back_gets_a_long_context() -> None:
    assert [find_longest_context(tokens) for tokens in (0, 2.6e6, 15e6, 1e12)] == [128, 128, 512, 1024]
    fast = make_speed_model([scale(step, 1e-3) for step in STEPS])
    code = CorpusFacts(10_000_000, 1.76)
    assert {each.context_length for each in choose(make_situation(60, code))} == {CONTEXTS[0]}
    assert pick(replace(make_situation(120, code), speed=fast)).context_length == CONTEXTS[-1]
    assert pick(replace(make_situation(120, code, context_length=256), speed=fast)).context_length == 256


def test_the_batch_grows_with_the_tokens_but_not_with_those_that_are_read_again() -> None:
    def choose_power(tokens: float, unique: float) -> int:
        return min(BATCHES, key=lambda batch: abs(math.log(batch / choose_batch(tokens, unique))))

    measured_best = {0.4e6: 1024, 0.8e6: 2048, 8.1e6: 8192}
    assert {tokens: choose_power(tokens, 100e6) for tokens in measured_best} == measured_best
    assert choose_power(25e6, 2.5e6) == choose_power(100e6, 2.5e6) == choose_power(20e6, 0.955e6) == 8192
    assert choose_power(100e6, 100e6) == 32_768


def test_measured_candidates_are_ranked_anew_and_the_others_stay_behind_them() -> None:
    situation = make_situation(120)
    expected = choose(situation)
    first, second = (each.step_seconds for each in expected[:2])
    found = correct(situation, expected, {0: 3 * first, 1: 1.1 * second, 2: math.inf})
    assert found[0].shape == expected[1].shape
    assert found[0].tokenizer == expected[1].tokenizer
    assert found[0].steps < expected[1].steps
    assert found[0].bits_per_byte > expected[1].bits_per_byte
    assert all((each.shape, each.tokenizer) != (expected[2].shape, expected[2].tokenizer) for each in found)
    assert found[2].bits_per_byte > expected[3].bits_per_byte, "as much slower as those that were measured"
    without_memory = correct(situation, expected, dict.fromkeys(range(3), math.inf))
    assert (without_memory[0].shape, without_memory[0].tokenizer) == (expected[3].shape, expected[3].tokenizer)
    with pytest.raises(UserError, match="fits into this device"):
        correct(situation, expected[:1], {0: math.inf})


def test_time_is_left_over_where_more_of_it_would_overfit() -> None:
    fast = make_speed_model([scale(step, 1 / 300) for step in STEPS])
    minutes, hours = (pick(replace(make_situation(seconds, PLAYS), speed=fast)) for seconds in (60, 7200))
    assert hours.share < 1
    assert hours.steps * hours.step_seconds < 7200 / 2
    assert hours.epochs < 200
    assert hours.dropout >= minutes.dropout > 0
    assert "more epochs of so little text would overfit" in _explain_steps(hours)
    assert pick(make_situation(7200)).share == 1


def test_compiling_pays_in_a_longer_run_that_needs_all_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "find_obstacle", lambda _device_type: None)
    plain = make_situation(900)
    compiled = compile_if_it_pays(plain, "cuda")
    assert (compiled.seconds, compiled.compiles) == (900 - COMPILE_SECONDS, True)
    assert pick(compiled).shape.block_weights >= pick(plain).shape.block_weights
    assert pick(compiled).bits_per_byte < pick(plain).bits_per_byte
    for unchanged in (make_situation(50), make_situation(COMPILE_SECONDS), make_situation(900, compile=False)):
        assert compile_if_it_pays(unchanged, "cuda") == unchanged
    assert compile_if_it_pays(plain, "cpu") == plain
    leisurely = make_situation(1e6, PLAYS)
    assert compile_if_it_pays(leisurely, "cuda") == leisurely, "most of the time is left over anyway"
    assert compile_if_it_pays(make_situation(1e6, PLAYS, compile=True), "cuda").compiles


def test_nothing_is_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "find_obstacle", lambda _device_type: Obstacle("no compiler", "install one"))
    assert not compile_if_it_pays(make_situation(900), "cuda").compiles


def test_compiled_steps_are_faster_all_but_their_head() -> None:
    model = make_speed_model([replace(step, head_flops=1e6) for step in STEPS])
    flops, fast = STEPS[1].token_flops, model.accelerate(SPEEDUP)
    assert fast.find_seconds(1024, flops) == pytest.approx(model.find_seconds(1024, flops) / SPEEDUP)
    head = model.find_seconds(1024, flops, 1e6) - model.find_seconds(1024, flops)
    assert fast.find_seconds(1024, flops, 1e6) - fast.find_seconds(1024, flops) == pytest.approx(head)


def test_a_machine_that_turns_out_faster_gets_more_steps_but_not_so_many_that_they_overfit() -> None:
    situation = make_situation(900, PLAYS)
    slow = pick(situation)
    most = find_most_steps(situation, slow)
    assert slow.share == 1
    assert slow.steps < most < 4 * slow.steps
    plenty = make_situation(900)
    assert find_most_steps(plenty, pick(plenty)) > 4 * pick(plenty).steps, "165 MB are not read up"
    hurried = replace(slow, share=0.5)
    assert find_most_steps(situation, hurried) == hurried.steps


def test_every_choice_is_a_valid_config() -> None:
    for candidate in choose(make_situation(300)):
        check_config(layer_config(candidate.list_values({}), {"data_dir": "words"}))


def test_options_of_the_user_are_kept_and_the_rest_chosen_around_them() -> None:
    free = pick(make_situation(240))
    given = {"num_layers": 7, "context_length": 64, "total_batch_size": 2048, "dropout": 0.3}
    fixed = pick(make_situation(240, **given))
    values = fixed.list_values(given)
    assert fixed.shape.num_layers == 7
    assert {name: values[name] for name in given} == given
    assert values["max_steps"] * 2048 * fixed.step_seconds / 2048 <= 240
    assert fixed.bits_per_byte >= free.bits_per_byte - 0.05
    assert pick(make_situation(240, max_steps=123)).steps == 123


def test_a_slower_machine_gets_a_model_that_is_not_larger() -> None:
    slow = make_speed_model([scale(step, 8) for step in STEPS])
    fast, slower = pick(make_situation(1200)), pick(replace(make_situation(1200), speed=slow))
    assert slower.shape.block_weights <= fast.shape.block_weights
    assert slower.bits_per_byte > fast.bits_per_byte


def test_no_time_is_one_clear_sentence() -> None:
    with pytest.raises(UserError, match="nothing can be trained for at least 50 steps in the 1 s that are left"):
        choose(make_situation(1.0))


def test_learning_rates_transfer_over_width() -> None:
    assert choose_rates("muon", 64, 1000)["matrix_lr"] == choose_rates("muon", 1024, 1000)["matrix_lr"]
    assert choose_rates("adamw", 512, 1000)["max_lr"] == choose_rates("adamw", 128, 1000)["max_lr"] / 4
    assert choose_rates("adamw", 32, 1000) == choose_rates("adamw", 64, 1000)
    assert choose_rates("muon", 768, 1000)["max_lr"] == pytest.approx(3.1e-3)
    assert choose_rates("muon", 64, 8)["warmup_steps"] == 2


def test_speed_is_interpolated_and_never_falls_with_the_size() -> None:
    noisy = make_speed_model([MeasuredStep(1000, *each) for each in ((4e6, 0.05), (1e6, 0.06), (16e6, 0.24))])
    times = [noisy.find_seconds(1000, flops) for flops in (1e5, 1e6, 2e6, 4e6, 8e6, 16e6, 32e6)]
    assert times == sorted(times)
    assert times[:4] == pytest.approx([0.06] * 4)
    assert times[4] == pytest.approx(0.12)
    assert times[6] == pytest.approx(0.48)


def test_fewer_tokens_save_no_time_of_the_update() -> None:
    model = make_speed_model([MeasuredStep(1000, 1e6, 0.05, 0.01), MeasuredStep(1000, 4e6, 0.2, 0.04)])
    assert model.find_seconds(500, 1e6) == pytest.approx(0.03)
    assert model.find_seconds(500, 4e6) == pytest.approx(0.12)
    assert model.find_seconds(2000, 8e6) == pytest.approx(0.72)


def test_the_head_costs_what_two_vocabularies_showed() -> None:
    small, large = MeasuredStep(1000, 1e6, 0.04, 0.0, 4e5), MeasuredStep(1000, 1e6, 0.06, 0.0, 32e5)
    wide = MeasuredStep(1000, 8e6, 0.2, 0.0, 8e5)
    model = make_speed_model([large, small, wide])
    for step in (small, large, wide):
        assert model.find_seconds(step.tokens, step.token_flops, step.head_flops) == pytest.approx(step.seconds)
    assert make_speed_model([replace(small, seconds=0.9), small, large]) == make_speed_model([small, large])
    noisy = make_speed_model([replace(small, seconds=0.07), large])
    assert noisy.find_seconds(1000, 1e6, 32e5) == noisy.find_seconds(1000, 1e6, 4e5) == pytest.approx(0.07)


def test_candidates_are_measured_until_the_best_is_among_them() -> None:
    situation = make_situation(30)
    expected = choose(situation)

    def measure_as_expected(candidate: Candidate) -> float:
        return candidate.step_seconds

    def find_the_first_slow(candidate: Candidate) -> float:
        return (10 if candidate == expected[0] else 1) * candidate.step_seconds

    assert list(measure_best(situation, expected, measure_as_expected, GPU_TURNS)) == list(range(LEAST_MEASURED))
    measured = measure_best(situation, expected, find_the_first_slow, GPU_TURNS)
    assert LEAST_MEASURED < len(measured) <= MOST_MEASURED
    best, *others = correct(situation, expected, measured)
    assert (best.tokenizer, best.shape) == (expected[1].tokenizer, expected[1].shape)
    assert all(best.bits_per_byte <= each.bits_per_byte for each in others)
    assert list(measure_best(situation, expected[:2], measure_as_expected, GPU_TURNS)) == [0, 1]


def test_a_machine_that_swings_does_not_decide_since_candidates_take_turns() -> None:
    situation = make_situation(30)
    expected = choose(situation)
    order: list[int] = []

    def measure_on_a_busy_machine(candidate: Candidate) -> float:
        """Three times as slow in the first turn of the best candidate."""
        number = expected.index(candidate)
        order.append(number)
        return candidate.step_seconds * (3 if number == 0 and order.count(0) == 1 else 1)

    measured = measure_best(situation, expected, measure_on_a_busy_machine, CPU_TURNS)
    quiet = {number: expected[number].step_seconds for number in measured}
    assert correct(situation, expected, measured) == correct(situation, expected, quiet)
    order.clear()

    def swing(candidate: Candidate) -> float:
        """A fifth slower in three of five moments."""
        order.append(expected.index(candidate))
        return candidate.step_seconds * (1.2 if len(order) % 5 < 3 else 1.0)

    measured = measure_best(situation, expected, swing, CPU_TURNS)
    best = correct(situation, expected, measured)[0]
    near = [number for number in measured if order.count(number) > 1]
    assert len(near) >= 2
    assert {order.count(number) for number in near} == {CPU_TURNS}
    found = [measured[number] / expected[number].step_seconds for number in near]
    assert found == pytest.approx([1.2] * len(near)), (
        "none looks faster than another, and all as fast as they usually are"
    )
    turns = [order.index(number, LEAST_MEASURED) for number in near]
    assert max(turns) - min(turns) < len(near), "each has its second turn before any has its third"
    assert best.bits_per_byte <= AS_GOOD * min(each.bits_per_byte for each in correct(situation, expected, measured))


def test_of_models_that_are_as_good_the_smallest_is_chosen() -> None:
    situation = make_situation(900, PLAYS)
    expected = choose(situation)
    larger, smaller = next(
        (one, other)
        for one in expected
        for other in expected
        if other.shape.block_weights < one.shape.block_weights
        and one.bits_per_byte < other.bits_per_byte < AS_GOOD * one.bits_per_byte
    )
    measured = {expected.index(each): each.step_seconds for each in (larger, smaller)}
    assert correct(situation, expected, measured)[0].shape == smaller.shape
    measured[expected.index(smaller)] *= 1.5
    assert correct(situation, expected, measured)[0].shape == larger.shape


def test_a_moment_in_which_the_machine_is_busy_does_not_end_the_search() -> None:
    situation = make_situation(30)
    expected = choose(situation)
    factors = iter([1000.0])

    def measure_the_first_slow(candidate: Candidate) -> float:
        return next(factors, 1.0) * candidate.step_seconds

    measured = measure_best(situation, expected, measure_the_first_slow, GPU_TURNS)
    assert correct(situation, expected, measured)[0].shape == expected[1].shape, "others were measured as well"
    factors = iter([1000.0])
    assert measure_best(situation, expected[:1], measure_the_first_slow, GPU_TURNS)[0] == expected[0].step_seconds


@pytest.mark.parametrize(("seconds", "reason"), [(math.inf, "memory; ask for a smaller one"), (1e9, "give more time")])
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(seconds: float, reason: str) -> None:
    situation = make_situation(30, num_layers=8, embd_size=512)
    expected = choose(replace(situation, seconds=1e6))
    measured = measure_best(situation, expected, lambda _: seconds, CPU_TURNS)
    with pytest.raises(UserError, match=reason):
        correct(situation, expected, measured)


def make_rivals_plan() -> BudgetPlan:
    """Five minutes of a fast machine for three megabytes, which the best model needs a part of."""
    fast = make_speed_model([scale(step, 1 / 150) for step in STEPS])
    plays = replace(PLAYS, text_bytes=3_000_000)
    situation = replace(make_situation(300, plays), speed=fast)
    sample = Sample("", plays, is_whole=True, spread=0.0)
    return BudgetPlan("plays.txt", 300.0, 0.0, sample, situation, tuple(choose(situation)), (), "GPU", {})


def test_rivals_are_the_neighbours_of_the_first_model_and_then_of_the_best() -> None:
    plan = make_rivals_plan()
    order = sorted({each.shape for each in plan.candidates}, key=lambda shape: shape.block_weights)
    place = order.index(plan.best.shape)
    trained = [Trained(plan.best, 2.0)]
    while (rival := choose_rival(plan, trained, 300.0)) is not None:
        trained.append(Trained(rival, 1.9 if len(trained) == 1 else 2.1))
    both = order[place - 1], order[place + 1]
    assert {each.candidate.shape for each in trained[1:3]} == set(both)
    assert trained[1].candidate.bits_per_byte <= trained[2].candidate.bits_per_byte
    better = order.index(trained[1].candidate.shape)
    further = order[2 * better - place]
    assert [each.candidate.shape for each in trained[3:]] == [further], "in the direction that was better"
    assert tuple(each.shape for each in list_first_rivals(plan)) == both


def test_no_rival_is_begun_that_does_not_fit_or_cannot_win() -> None:
    plan = make_rivals_plan()
    first = [Trained(plan.best, 2.0)]
    rival = choose_rival(plan, first, 300.0)
    assert rival is not None
    needed = rival.steps * rival.step_seconds
    hurried = choose_rival(plan, first, needed)
    assert hurried is not None
    assert 0.5 * needed < hurried.steps * hurried.step_seconds < needed - START_SECONDS - END_SECONDS
    assert choose_rival(plan, first, 9.0) is None, "it has to start and to end, too"
    certain = replace(plan, situation=replace(plan.situation, law=replace(LAW, spread=1e-6)))
    assert choose_rival(certain, first, 300.0) is None
    busy = make_situation(60.0)
    whole = replace(plan, situation=busy, candidates=tuple(choose(busy)))
    assert whole.best.share == 1.0
    assert list_first_rivals(whole) == []
