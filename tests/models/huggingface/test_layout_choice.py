"""Which Hugging Face layout a composition has, and the settings that prevent one, each by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.model import (
    Gelu,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    Moe,
    NoPositions,
    Relu2,
    RmsNorm,
    Rope,
    SwiGlu,
)
from gptmill.models.huggingface.layouts import choose_layout, describe_layout, explain_no_layout, find_obstacles

CLASSIC = ModelConfig()
LLAMA = replace(CLASSIC, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu())
QWEN3 = replace(LLAMA, qk_norm=True)
QWEN3_MOE = replace(QWEN3, feed_forward=Moe())
MODELS = {"gpt2": CLASSIC, "llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"logit_softcap": 15.0}, "logit_softcap = 15.0"),
    ({"value_embeddings": 2}, "value_embeddings = 2"),
    ({"positions": NoPositions()}, "positions = none"),
    ({"feed_forward": Relu2()}, "feed_forward = relu2"),
    ({"attention_windows": "128,256,full"}, "attention_windows = 128,256,full"),
]
CHANGES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gpt2": [
        ({"norm": RmsNorm()}, "norm = rmsnorm"),
        ({"norm": LayerNorm(norm_bias=False)}, "norm_bias = False"),
        ({"positions": Rope()}, "positions = rope"),
        ({"feed_forward": SwiGlu()}, "feed_forward = swiglu"),
        ({"feed_forward": Moe()}, "feed_forward = moe"),
        ({"bias": False}, "bias = False"),
        ({"tied_head": False}, "tied_head = False"),
        ({"num_kv_heads": 4}, "num_kv_heads = 4"),
        ({"head_size": 96}, "head_size = 96"),
        ({"qk_norm": True}, "qk_norm = True"),
        ({"attention_windows": "256"}, "attention_windows = 256"),
    ],
    "llama": [
        ({"norm": LayerNorm()}, "norm = layernorm"),
        ({"positions": LearnedPositions()}, "positions = learned"),
        ({"feed_forward": Gelu()}, "feed_forward = gelu"),
        ({"feed_forward": Moe()}, "feed_forward = moe"),
        ({"qk_norm": True}, "qk_norm = True"),
        ({"attention_windows": "256"}, "attention_windows = 256"),
        ({"num_heads": 7, "head_size": 64}, "num_heads = 7 (does not divide embd_size 768)"),
    ],
    "qwen3": [
        ({"norm": LayerNorm()}, "norm = layernorm"),
        ({"positions": LearnedPositions()}, "positions = learned"),
        ({"feed_forward": Gelu()}, "feed_forward = gelu"),
        ({"qk_norm": False}, "qk_norm = False"),
        ({"bias": True}, "bias = True"),
    ],
    "qwen3_moe": [
        ({"norm": LayerNorm()}, "norm = layernorm"),
        ({"positions": LearnedPositions()}, "positions = learned"),
        ({"feed_forward": SwiGlu()}, "feed_forward = swiglu"),
        ({"qk_norm": False}, "qk_norm = False"),
        ({"bias": True}, "bias = True"),
        ({"attention_windows": "256,full"}, "attention_windows = 256,full (not the same in every layer)"),
    ],
}
CASES = [(layout, *case) for layout, cases in CHANGES.items() for case in (*cases, *EVERYWHERE)]


@pytest.mark.parametrize(("layout", "changes", "obstacle"), CASES, ids=[f"{case[0]}: {case[2]}" for case in CASES])
def test_each_part_outside_a_layout_is_named(layout: str, changes: dict[str, Any], obstacle: str) -> None:
    (found,) = find_obstacles(replace(MODELS[layout], **changes), layout)
    assert found == obstacle or found.startswith(f"{obstacle} (")


@pytest.mark.parametrize("layout", MODELS)
def test_each_layout_is_found_whatever_it_leaves_open(layout: str) -> None:
    open_fields: dict[str, Any] = {"dropout": 0.1, "norm_eps": 1e-6, "mtp_heads": 2, "zero_init": True}
    if layout != "gpt2":
        open_fields |= {"num_kv_heads": 4, "head_size": 32, "tied_head": False}
    for changes in ({}, open_fields, {"attention_windows": "full"}):
        config = replace(MODELS[layout], **changes)
        assert choose_layout(config) == layout == describe_layout(config)


def test_windows_of_one_length_are_qwen3s() -> None:
    assert choose_layout(replace(QWEN3, attention_windows="256,256,full")) == "qwen3"
    assert choose_layout(replace(QWEN3_MOE, attention_windows="256")) == "qwen3_moe"


def test_one_sentence_names_what_prevents_the_nearest_layout() -> None:
    config = replace(LLAMA, value_embeddings=2, logit_softcap=15.0)
    assert describe_layout(config) == "none: logit_softcap = 15.0, value_embeddings = 2"
    assert explain_no_layout(config) == (
        "no Hugging Face layout can represent this model: llama is the nearest, and logit_softcap = 15.0 and "
        "value_embeddings = 2 prevent it; only a model that was trained with --logit_softcap none "
        "--value_embeddings 0 can be exported"
    )
    mixture = replace(QWEN3_MOE, qk_norm=False)
    assert describe_layout(mixture) == "none: qk_norm = False"
    assert "qwen3_moe is the nearest, and qk_norm = False prevents it" in explain_no_layout(mixture)
