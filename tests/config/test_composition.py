"""Incompatible components of a model are rejected, and the suggested fix works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gptmill.config.errors import ConfigError
from gptmill.config.recipes import layer_config
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.config.validation import find_problems

FP8 = {"precision": "fp8"}
MOE = {"feed_forward": "moe", "num_experts": 4}


def find(**values: Any) -> list[str]:
    return [str(problem) for problem in find_problems(build_config(RunConfig, values))]


@pytest.mark.parametrize(
    ("values", "name", "part"),
    [
        ({"num_heads": 7}, "num_heads", "does not divide embd_size 768; the nearest that do are 6 and 8"),
        ({"num_kv_heads": 5}, "num_kv_heads", "does not divide num_heads 12; the nearest that do are 4 and 6"),
        ({"positions": "rope", "head_size": 63}, "positions", "the head dimension is 63"),
        ({"attention_windows": "2048"}, "attention_windows", "longer than context_length 1024; use full"),
        ({"attention_windows": "64,wide"}, "attention_windows", "'wide' must be a positive number of tokens"),
        ({"attention_windows": "0"}, "attention_windows", "'0' must be a positive number of tokens"),
        ({"attention_windows": "1," * 12 + "1"}, "attention_windows", "lists 13 layers, but the model has 12"),
        ({**MOE, "experts_per_token": 5}, "experts_per_token", "exceeds num_experts 4"),
        ({**MOE, "experts_per_token": 1}, "experts_per_token", "without a gradient; use at least 2"),
        ({"value_embeddings": 7}, "value_embeddings", "use at most 6"),
        ({"mtp_heads": 1024}, "mtp_heads", "further ahead than context_length"),
        ({"fp8_layers": "all"}, "fp8_layers", "precision is auto; use --precision fp8"),
        ({**FP8, "embd_size": 600}, "precision", "embd_size is 600; the nearest that fit are 592 and 608"),
        ({**FP8, "ffn_size": 100}, "precision", "ffn_size is 100; the nearest that fit are 96 and 112"),
        (
            {**FP8, "num_kv_heads": 1, "head_size": 8},
            "precision",
            "num_kv_heads x head_size is 8; the nearest that fit are 16",
        ),
        (
            {**FP8, "mini_batch_size": 1, "context_length": 40, "total_batch_size": 40},
            "precision",
            "is 40; the nearest",
        ),
        ({**FP8, "fp8_layers": "all", "loss_chunk": 1000}, "precision", "loss_chunk is 1000; the nearest"),
        ({**FP8, **MOE, "fp8_layers": "feed_forward"}, "precision", "no fp8 GEMM for experts"),
        ({"batch_size_warmup": "1000:5"}, "batch_size_warmup", "has a batch of 1000 tokens, which is not a multiple"),
        ({"batch_size_warmup": "32768"}, "batch_size_warmup", "must have the form TOKENS:STEP"),
        ({"batch_size_warmup": "32768:9,65536:9"}, "batch_size_warmup", "steps must increase"),
    ],
)
def test_incompatible_components_are_rejected_with_a_fix(values: dict[str, Any], name: str, part: str) -> None:
    (problem,) = find(**values)
    assert problem.startswith(f"{name} = "), problem
    assert part in problem


@pytest.mark.parametrize("values", [{"num_heads": 7}, {"num_kv_heads": 5}, {**FP8, "embd_size": 600}])
def test_every_suggested_number_works(values: dict[str, Any]) -> None:
    (problem,) = find(**values)
    name = "embd_size" if "precision" in values else next(iter(values))
    proposed = [int(number) for number in re.findall(r"\d+", problem.rpartition("nearest")[2])]
    assert proposed
    for number in proposed:
        # A width that fits fp8 may still need another number of heads.
        assert not [text for text in find(**{**values, name: number}) if text.startswith((name, "precision"))]


@pytest.mark.parametrize(
    "values",
    [
        {"num_heads": 7, "head_size": 64},
        {"num_kv_heads": 1},
        {"attention_windows": "1024,full,1"},
        {**MOE, "experts_per_token": 4},
        {"feed_forward": "moe", "num_experts": 1, "experts_per_token": 1},
        {"value_embeddings": 6},
        {**FP8, "fp8_layers": "all"},
        {"batch_size_warmup": "32768:9,65536:10"},
    ],
)
def test_compatible_components_are_accepted(values: dict[str, Any]) -> None:
    assert find(**values) == []


def test_a_value_of_a_variant_that_is_not_selected_names_that_variant() -> None:
    with pytest.raises(ConfigError) as caught:
        layer_config({}, {"num_experts": 4, "rope_base": 5e5})
    text = str(caught.value)
    assert "num_experts = 4: applies only to feed_forward moe; add --feed_forward moe, or remove it" in text
    assert "rope_base = 500000.0: applies only to positions rope" in text


def test_a_flag_that_selects_another_variant_drops_the_recipes_values_of_the_first() -> None:
    config = layer_config({**MOE, "ffn_size": 48}, {"feed_forward": "swiglu"})
    assert config.model.hidden_size == 48


def test_a_huge_number_of_heads_is_rejected_quickly() -> None:
    (problem,) = find(embd_size=999_999_999_989, num_heads=2**38)
    assert "does not divide" in problem
