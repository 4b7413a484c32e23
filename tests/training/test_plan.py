"""The numbers that follow from a config, a corpus and a world."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, make_config, make_shards, plan_for

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.run import RunConfig
from gptmill.config.schema import find_owners, list_fields
from gptmill.config.validation import check_config
from gptmill.data.shards.opening import TokenShards
from gptmill.models.flops import count_flops
from gptmill.models.gpt import build_gpt
from gptmill.runtime.world import World
from gptmill.training.plan import check_step_time


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def shorten(shards: TokenShards, train: int, val: int) -> TokenShards:
    """The same corpus with splits of so many tokens."""
    return replace(shards, train=(shards.train[0][:train],), val=(shards.val[0][:val],))


def test_the_numbers_of_a_plan(shards: TokenShards) -> None:
    plan = plan_for(make_config(total_batch_size=256, mini_batch_size=4, max_steps=7), shards)
    assert (plan.tokens_per_step, plan.windows_per_step, plan.micro_batches) == (256, 16, 4)
    assert plan.max_steps == 7
    assert plan.precision == "fp32"
    windows = (len(shards.train[0]) - 1) // 16
    assert plan.steps_per_epoch == windows / 16


def test_the_vocabulary_is_padded_to_a_multiple_of_64(shards: TokenShards) -> None:
    assert shards.tokenizer.vocab_size == 257
    assert plan_for(make_config(), shards).padded_vocab_size == 320


def test_the_parameters_are_those_of_the_model(shards: TokenShards) -> None:
    config = make_config(num_layers=3, embd_size=24, num_heads=3)
    plan = plan_for(config, shards)
    model = build_gpt(config.model, plan.padded_vocab_size, seed=0)
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_steps_follow_from_epochs_over_the_corpus(shards: TokenShards) -> None:
    corpus = shorten(shards, train=16 * 60 + 1, val=100)
    plan = plan_for(make_config(max_steps=None, num_epochs=3, total_batch_size=128), corpus)
    assert (plan.windows_per_step, plan.steps_per_epoch) == (8, 7.5)
    assert plan.max_steps == 22


def test_epochs_that_are_a_whole_number_of_steps_lose_none_to_rounding(shards: TokenShards) -> None:
    corpus = shorten(shards, train=16 * 61 + 1, val=100)
    config = make_config(max_steps=None, num_epochs=7, total_batch_size=7 * 16, mini_batch_size=7)
    assert plan_for(config, corpus).max_steps == 61


def test_steps_follow_from_epochs_of_a_given_length(shards: TokenShards) -> None:
    plan = plan_for(make_config(max_steps=None, num_epochs=5, steps_per_epoch=11), shards)
    assert (plan.steps_per_epoch, plan.max_steps) == (11, 55)


def test_max_steps_goes_before_epochs(shards: TokenShards) -> None:
    assert plan_for(make_config(max_steps=3, num_epochs=5, steps_per_epoch=11), shards).max_steps == 3


def test_an_epoch_shorter_than_a_step_is_still_one_step(shards: TokenShards) -> None:
    corpus = shorten(shards, train=33, val=33)
    plan = plan_for(make_config(max_steps=None, num_epochs=1, total_batch_size=128), corpus)
    assert plan.max_steps == 1
    assert plan.steps_per_epoch == 2 / 8


def test_ranks_share_the_micro_batches(shards: TokenShards) -> None:
    config = make_config(total_batch_size=384, mini_batch_size=2)
    plans = {size: plan_for(config, shards, World(0, size, torch.device("cpu"))) for size in (1, 2, 3, 4, 6, 12)}
    assert {size: plan.micro_batches for size, plan in plans.items()} == {1: 12, 2: 6, 3: 4, 4: 3, 6: 2, 12: 1}
    assert len({replace(plan, micro_batches=0, ranks=0) for plan in plans.values()}) == 1


def test_a_batch_that_does_not_divide_among_the_ranks_is_refused_with_the_nearest(shards: TokenShards) -> None:
    config = make_config(total_batch_size=128, mini_batch_size=4)
    with pytest.raises(ConfigError, match=r"3 rank\(s\) = 192 tokens; the nearest are 192") as error:
        plan_for(config, shards, World(0, 3, torch.device("cpu")))
    assert "total_batch_size = 128" in str(error.value)


@pytest.mark.parametrize("train", [1, 16])
def test_a_split_shorter_than_a_window_is_refused(shards: TokenShards, train: int) -> None:
    with pytest.raises(UserError, match="the train split") as error:
        plan_for(make_config(), shorten(shards, train, val=100))
    assert f"{train} tokens" in str(error.value)
    assert "17" in str(error.value)
    assert "--context_length" in str(error.value)


def test_one_window_and_its_target_are_enough(shards: TokenShards) -> None:
    assert plan_for(make_config(), shorten(shards, train=17, val=17)).steps_per_epoch == 1 / 8


def test_the_windows_of_all_shards_count(shards: TokenShards) -> None:
    pieces = tuple(np.array_split(shards.train[0][:340], 4))
    plan = plan_for(make_config(), replace(shards, train=pieces))
    assert plan.steps_per_epoch == 4 * ((85 - 1) // 16) / 8


def test_a_precision_that_was_asked_for_is_in_the_plan(shards: TokenShards) -> None:
    assert plan_for(make_config(precision="bf16"), shards).precision == "bf16"


def test_stages_make_the_first_batches_smaller(shards: TokenShards) -> None:
    config = make_config(total_batch_size=256, mini_batch_size=2, batch_size_warmup="64:3,128:5")
    plan = plan_for(config, shards)
    assert [plan.count_windows(step) for step in range(1, 8)] == [4, 4, 4, 8, 8, 16, 16]
    assert [plan.count_micro_batches(step) for step in range(1, 8)] == [2, 2, 2, 4, 4, 8, 8]
    halved = plan_for(config, shards, World(0, 2, torch.device("cpu")))
    assert [halved.count_windows(step) for step in (1, 4, 6)] == [4, 8, 16]
    assert [halved.count_micro_batches(step) for step in (1, 4, 6)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("steps_done", "windows", "last"),
    [
        (0, 3, 0),
        (0, 4, 1),
        (0, 12, 3),
        (0, 19, 3),
        (0, 28, 5),
        (0, 43, 5),
        (0, 44, 6),
        (2, 4, 3),
        (2, 20, 5),
        (9, 33, 11),
    ],
)
def test_the_last_step_follows_from_the_windows_of_the_stages(
    shards: TokenShards, steps_done: int, windows: int, last: int
) -> None:
    plan = plan_for(make_config(total_batch_size=256, mini_batch_size=2, batch_size_warmup="64:3,128:5"), shards)
    assert plan.find_last_step(steps_done, windows) == last


def test_epochs_in_stages_read_the_corpus_as_often(shards: TokenShards) -> None:
    corpus = shorten(shards, train=16 * 60 + 1, val=100)
    fields = {"max_steps": None, "num_epochs": 3, "total_batch_size": 128, "batch_size_warmup": "64:10"}
    plan = plan_for(make_config(**fields), corpus)
    assert plan.max_steps == 10 + (3 * 60 - 10 * 4) // 8
    assert sum(plan.count_windows(step) for step in range(1, plan.max_steps + 1)) <= 3 * 60


def test_a_stage_larger_than_the_batch_ends_a_run_too(shards: TokenShards) -> None:
    plan = plan_for(make_config(batch_size_warmup="512:5"), shards)  # 32 windows a step, 8 later
    assert plan.find_last_step(0, 31 + 32) == 1


def test_the_tokens_of_all_steps(shards: TokenShards) -> None:
    assert plan_for(make_config(max_steps=7), shards).count_tokens() == 7 * 128
    assert (
        plan_for(make_config(max_steps=7, batch_size_warmup="64:3,192:5"), shards).count_tokens()
        == 3 * 64 + 2 * 192 + 256
    )
    assert plan_for(make_config(max_steps=4, batch_size_warmup="64:3,192:5"), shards).count_tokens() == 3 * 64 + 192


def test_the_operations_of_a_token_follow_the_stages_of_the_context(shards: TokenShards) -> None:
    config = make_config(context_length=16, context_warmup="4:2,8:5")
    plan = plan_for(config, shards)
    widths = {1: 4, 2: 4, 3: 8, 5: 8, 6: 16, 50: 16}
    for step, width in widths.items():
        assert plan.find_flops(step) == count_flops(config.model, plan.padded_vocab_size, width), step


def test_the_peak_rate_is_that_of_the_device_in_the_chosen_precision(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(precision="bf16")
    assert plan_for(config, shards).peak_flops_per_second is None
    monkeypatch.setattr("gptmill.training.plan.describe_device", lambda _device: "NVIDIA H200 (cuda:0)")
    plan = plan_for(config, shards, World(0, 2, torch.device("cpu")))
    assert plan.peak_flops_per_second == pytest.approx(989.4e12)
    assert plan.ranks == 2


NUMBERS = [field for field in list_fields(RunConfig) if field.kind in (int, float)]
LLAMA3 = {"positions": "rope", "rope_scaling": "llama3"}


def refuse(config: RunConfig, shards: TokenShards) -> str:
    """The sentence that refuses a config; empty if it can be planned."""
    try:
        check_config(config)
        check_step_time(plan_for(config, shards), CPU)
    except UserError as error:
        return str(error)
    return ""


def test_no_number_is_too_large_for_a_plan_or_a_sentence(shards: TokenShards) -> None:
    assert len(NUMBERS) > 50
    for field, value in product(NUMBERS, (10**9, 10**12, 10**13, 10**18, 2**63, 10**30, 10**308)):
        variants = LLAMA3 if field.name.startswith("rope") else dict(find_owners(RunConfig, field.name)[:1])
        number = field.kind(value)
        sentence = refuse(make_config(**{**variants, field.name: number}), shards)
        can_be_planned = value <= 10**12 or (field.name == "seed" and value < 2**63)
        assert bool(sentence) or can_be_planned, field.name
        assert not sentence or str(number)[:20] in sentence or "train split" in sentence, sentence


def test_a_step_that_no_device_ends_in_a_day_is_refused(shards: TokenShards) -> None:
    tokens = 64 * 10**10
    said = f"a step of {tokens:,} tokens, in 10,000,000,000 micro-batches of 1 rank(s), takes at least 2.3 days"
    assert f"total_batch_size = {tokens}: {said}" in refuse(make_config(total_batch_size=tokens), shards)
    assert f"total_batch_size = 128: {said}" in refuse(make_config(batch_size_warmup=f"{tokens}:5"), shards)


def test_a_step_of_a_large_model_has_a_limit_of_its_own(shards: TokenShards) -> None:
    large = {"num_layers": 48, "embd_size": 1600, "num_heads": 25, "mini_batch_size": 2**20}
    assert refuse(make_config(**large, total_batch_size=2**24), shards) == ""
    sentence = refuse(make_config(**large, total_batch_size=2**37), shards)
    assert re.search(r"takes at least \d+\.\d days \(1\.\de\+21 FLOPs on ", sentence)
