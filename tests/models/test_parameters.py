"""Parameter counts: those that were published with GPT-2, and those of the model that is really built."""

from __future__ import annotations

import pytest
import torch
from compositions import COMPOSITIONS, build_wild, draw_tokens
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


PARTS = {
    "token_embedding": "token_embedding",
    "position_embedding": "position_embedding",
    "value_embeddings": "value_embeddings",
    "blocks": "blocks",
    "final_norm": "final_norm",
    "head": "head",
    "mtp_heads": "extra_blocks",
}


@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_each_part_of_every_composition_is_counted_for_itself(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GPT(config, 100)
    count = count_parameters(config, 100)
    for part, name in PARTS.items():
        module = getattr(model, name)
        expected = sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
        assert getattr(count, part) == expected, part
    assert count.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_those_active_are_those_that_a_token_s_logits_depend_on(config: ModelConfig) -> None:
    model = build_wild(config)
    model.logits(draw_tokens(1, 1)).sum().backward()
    idle = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            idle += parameter.numel()
        elif name.endswith(("mlp.gate_up", "mlp.down_proj")):
            idle += int((parameter.grad.flatten(1).abs().amax(dim=1) == 0).sum()) * parameter[0].numel()
    count = count_parameters(config, 50)
    assert count.active == count.total - idle


@given(vocab_size=st.integers(1, 10**6))
def test_a_vocabulary_is_padded_to_the_next_multiple_of_64(vocab_size: int) -> None:
    padded = pad_vocab(vocab_size)
    assert padded % 64 == 0
    assert vocab_size <= padded < vocab_size + 64


def test_gpt2s_vocabulary_is_padded_to_50304() -> None:
    assert pad_vocab(50257) == 50304
