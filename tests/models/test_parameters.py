"""Parameter counts: those that were published with GPT-2, and those of the model that is really built."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.config.recipes import load_recipe
from gptmill.config.run import ModelConfig
from gptmill.config.schema import build_config
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.parameters import count_parameters

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
}


def count_built(config: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config, vocab_size).parameters())


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_sizes_of_gpt2_have_their_published_counts(recipe: str) -> None:
    config = build_config(ModelConfig, load_recipe(recipe))
    assert count_parameters(config, 50257).total == PUBLISHED[recipe]
    assert count_built(config, 50257) == PUBLISHED[recipe]


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 8),
    context=st.integers(1, 32),
    vocab=st.integers(1, 99),
)
@settings(deadline=None, max_examples=25)
def test_the_count_is_that_of_the_model_built(
    layers: int, heads: int, head_size: int, context: int, vocab: int
) -> None:
    config = ModelConfig(num_layers=layers, embd_size=heads * head_size, num_heads=heads, context_length=context)
    assert count_parameters(config, vocab).total == count_built(config, vocab)


def test_each_part_is_counted_for_itself() -> None:
    config = ModelConfig(num_layers=3, embd_size=16, num_heads=2, context_length=8)
    with torch.device("meta"):
        model = GPT(config, 100)
    count = count_parameters(config, 100)
    for part in ("token_embedding", "position_embedding", "blocks", "final_norm"):
        assert getattr(count, part) == sum(parameter.numel() for parameter in getattr(model, part).parameters())


@given(vocab_size=st.integers(1, 10**6))
def test_a_vocabulary_is_padded_to_the_next_multiple_of_64(vocab_size: int) -> None:
    padded = pad_vocab(vocab_size)
    assert padded % 64 == 0
    assert vocab_size <= padded < vocab_size + 64


def test_gpt2s_vocabulary_is_padded_to_50304() -> None:
    assert pad_vocab(50257) == 50304
