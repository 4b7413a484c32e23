"""make_config: a recipe and keywords, with every problem in one error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gptmill
from gptmill.api.training import train
from gptmill.config.errors import ConfigError
from gptmill.config.model import ModelConfig, Moe
from gptmill.config.recipes import layer_config
from gptmill.config.recipes import make_config as make_from_flags
from gptmill.config.run import RunConfig


def test_keywords_go_on_top_of_the_recipe_as_flags_do() -> None:
    fields = {"max_lr": 1e-3, "feed_forward": "moe", "num_experts": 4}
    assert gptmill.make_config("demo", **fields) == make_from_flags("demo", fields)
    assert gptmill.make_config() == RunConfig()


def test_one_error_names_every_problem_with_suggestions() -> None:
    with pytest.raises(ConfigError) as error:
        gptmill.make_config("demo", max_lrr=3, num_layers=2.5, num_heads=0, num_experts=4, context_length="8")
    assert [str(problem) for problem in error.value.problems] == [
        "max_lrr: unknown option (did you mean max_lr?)",
        "num_layers = 2.5: expected a whole number",
        "context_length = '8': expected a whole number without quotes",
        "num_experts = 4: applies only to feed_forward moe; add --feed_forward moe, or remove it",
        "num_heads = 0: must be at least 1",
    ]


def test_an_unknown_recipe_is_one_of_the_problems() -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_lrr.*did you mean demo"):
        gptmill.make_config("dem", max_lrr=3)
    with pytest.raises(gptmill.UserError, match="did you mean demo"):
        gptmill.make_config("dem")


def test_former_names_work_but_not_beside_the_new_ones() -> None:
    assert gptmill.make_config(read_ahead=7).data.prefetch_batches == 7
    with pytest.raises(ConfigError, match="read_ahead and prefetch_batches: are two names"):
        gptmill.make_config(read_ahead=7, prefetch_batches=7)


def test_paths_and_numbers_of_numpy_are_welcome() -> None:
    config = gptmill.make_config(data_dir=Path("data/words"), max_steps=np.int64(3), max_lr=np.float32(0.5))
    assert (config.data.data_dir, config.training.max_steps, config.optimizer.max_lr) == ("data/words", 3, 0.5)


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        (ModelConfig(num_layers=2.5, embd_size=-1), ["num_layers = 2.5: expected a whole", "embd_size = -1: must be"]),
        (ModelConfig(feed_forward="moe"), ["feed_forward = moe: expected Gelu(...)"]),
        (ModelConfig(feed_forward=Moe(num_experts="4")), ["num_experts = 4: expected a whole number without"]),
        (ModelConfig(num_heads=True), ["num_heads = True: expected a whole number"]),
    ],
)
def test_training_checks_the_types_of_a_config_made_by_hand(model: ModelConfig, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        train(replace(RunConfig(), model=model))
    assert len(error.value.problems) == len(messages)
    for problem, message in zip(error.value.problems, messages, strict=True):
        assert str(problem).startswith(message)


def test_a_config_whose_section_is_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model = gpt2: expected ModelConfig\(\.\.\.\)"):
        train(RunConfig(model="gpt2"))


def test_layers_of_values_refuse_names_that_no_option_has() -> None:
    with pytest.raises(ConfigError, match=r"max_lrr: unknown option \(did you mean max_lr\?\)"):
        layer_config({"max_lrr": 3})
