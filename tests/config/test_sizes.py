"""Sizes: each loads and validates, leaves a recipe's training alone, and is as large as its title says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptmill.config.errors import UserError
from gptmill.config.model import Gelu, ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.config.recipes import layer_config, list_recipes, load_recipe
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields
from gptmill.config.sizes import SHIPPED_SIZES, list_sizes, load_size
from gptmill.config.validation import find_problems
from gptmill.models.parameters import count_parameters

GPT2_TOKENS = 50_257
# In millions: as published, or as the titles say.
MILLIONS = {
    "gpt2-small": 124.4,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "custom-300m": 248.7,
    "custom-300m-modern": 303.2,
    "custom-500m": 504.8,
    "custom-1b": 993.0,
    "llama-124m": 123.5,
    "qwen3-124m": 124.7,
    "qwen3-moe-small": 284.0,
    "llama-70b": 69_276.0,
}
RECIPES_OF_SIZES = {
    **{name: name for name in ("custom-300m", "custom-300m-modern", "custom-500m", "custom-1b")},
    "modern-124m": "llama-124m",
    "moe-small": "qwen3-moe-small",
}


def load_model(name: str) -> ModelConfig:
    return layer_config(load_size(name)).model


def count_by_hand(config: ModelConfig, active_only: bool = False) -> int:
    """Matrices alone, in which nearly all parameters are."""
    width, head = config.embd_size, config.head_width
    attention = 2 * width * head * (config.num_heads + config.kv_heads)
    ffn = (2 if isinstance(config.feed_forward, Gelu) else 3) * width * config.hidden_size
    if isinstance(config.feed_forward, Moe):
        moe = config.feed_forward
        ffn = ffn * (moe.experts_per_token if active_only else moe.num_experts) + moe.num_experts * width
    places = 0 if isinstance(config.positions, Rope) else config.context_length
    embeddings = GPT2_TOKENS * (1 if config.tied_head else 2)
    return (embeddings + places) * width + config.num_layers * (attention + ffn)


def test_the_list_is_what_is_shipped_and_all_have_titles() -> None:
    assert list(list_sizes()) == sorted(path.stem for path in SHIPPED_SIZES.iterdir())
    assert all(list_sizes().values())
    assert MILLIONS.keys() | {"tiny-gpt2", "tiny-llama", "tiny-qwen3", "tiny-moe"} == list_sizes().keys()


def test_a_size_is_a_valid_model_and_sets_nothing_else() -> None:
    sections = {field.name: field.section for field in list_fields(RunConfig)}
    for name in list_sizes():
        values = load_size(name)
        assert {sections[key] for key in values} == {"model"}, name
        window = values["context_length"]
        batch = {"mini_batch_size": 1, "total_batch_size": window, "precision": "fp8"}
        assert find_problems(layer_config(values, batch)) == [], name


def test_a_size_is_as_large_as_it_says() -> None:
    configs = {name: load_model(name) for name in MILLIONS}
    assert [name for name, config in configs.items() if not config.tied_head] == ["llama-70b"]
    found = {name: count_by_hand(config) / 1e6 for name, config in configs.items()}
    assert found == pytest.approx(MILLIONS, rel=0.002)


def test_of_the_experts_two_work_for_a_token() -> None:
    assert count_by_hand(load_model("qwen3-moe-small"), active_only=True) / 1e6 == pytest.approx(114, abs=1)


def test_custom_300m_is_as_large_as_its_document_says_once_the_tied_embedding_is_counted_once() -> None:
    """Document 001: 51,463,168 in the embedding and 197,198,080 in the rest, 248,661,248 together."""
    count = count_parameters(load_model("custom-300m"), GPT2_TOKENS)
    assert count.token_embedding == 51_463_168
    assert count.head == 0
    assert count.total - count.token_embedding == pytest.approx(197_198_080, rel=0.0011)
    assert count.total == pytest.approx(300_124_416 - 51_463_168, rel=0.001)


def test_custom_300m_modern_is_what_it_is_known_for() -> None:
    config = load_model("custom-300m-modern")
    assert (config.num_layers, config.embd_size, config.num_heads, config.context_length) == (24, 1024, 16, 2048)
    assert config.norm == RmsNorm()
    assert config.positions == Rope()
    assert config.feed_forward == SwiGlu(ffn_size=2048)
    assert not config.bias


def test_nothing_of_a_recipes_model_is_left_in_a_size_but_its_dropout() -> None:
    recipe = load_recipe("moe-small") | {"dropout": 0.1}
    for name in list_sizes():
        config = layer_config(recipe, load_size(name))
        assert config.model == replace(load_model(name), dropout=0.1), name
        assert config.optimizer == layer_config(recipe).optimizer, name


@pytest.mark.parametrize(("recipe", "size"), RECIPES_OF_SIZES.items())
def test_recipes_of_a_size_have_its_model(recipe: str, size: str) -> None:
    assert recipe in list_recipes()
    assert replace(layer_config(load_recipe(recipe)).model, dropout=0.0) == load_model(size)


def test_an_unknown_size_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(UserError, match=r"unknown size 'gpt2-smal' \(did you mean gpt2-small\?\)") as error:
        load_size("gpt2-smal")
    assert all(name in str(error.value) for name in list_sizes())
