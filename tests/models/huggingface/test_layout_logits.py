"""Every layout: the same weights give the same logits in `transformers` and here, both ways, through files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptmill.config.errors import UserError
from gptmill.config.model import (
    Gelu,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Moe,
    RmsNorm,
    Rope,
    SwiGlu,
)
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.config_import import read_hf_config
from gptmill.models.huggingface.conversion import from_hf_weights, to_hf_weights
from gptmill.models.huggingface.layouts import choose_layout

VOCAB = 100
CLASSIC = ModelConfig(num_layers=3, embd_size=32, num_heads=4, context_length=24)
LLAMA = replace(CLASSIC, norm=RmsNorm(), norm_eps=1e-6, bias=False, positions=Rope(), feed_forward=SwiGlu(ffn_size=40))
LONG = replace(LLAMA, context_length=64, head_size=16)  # slow and fast rotations beside each other
LLAMA3 = Rope(rope_base=500.0, rope_scaling=Llama3Scaling(rope_factor=4.0, rope_original_context=32))
QWEN3 = replace(LLAMA, num_kv_heads=2, head_size=12, qk_norm=True)
QWEN3_MOE = replace(QWEN3, feed_forward=Moe(num_experts=5, experts_per_token=2, ffn_size=24))
MODELS = {
    "gpt2": CLASSIC,
    "gpt2 of another width": replace(CLASSIC, feed_forward=Gelu(ffn_size=48)),
    "llama": LLAMA,
    "llama untied": replace(LLAMA, tied_head=False),
    "llama with biases": replace(LLAMA, bias=True),
    "llama grouped": replace(LLAMA, num_kv_heads=2, positions=Rope(rope_base=500_000.0)),
    "llama linear": replace(LONG, positions=Rope(rope_scaling=LinearScaling(rope_factor=4.0))),
    "llama llama3": replace(LONG, positions=LLAMA3, num_kv_heads=1),
    "qwen3": QWEN3,
    "qwen3 untied with windows": replace(QWEN3, attention_windows="5,full", tied_head=False),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe untied with windows": replace(QWEN3_MOE, attention_windows="5", tied_head=False),
}


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


@torch.no_grad()
def make_wild(model: torch.nn.Module) -> None:
    """Randomises every parameter, biases and norms too, so that a swapped or forgotten one is noticed."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")  # weak norms would hide what attention does
        parameter.normal_(1.0 if is_norm else 0.0, 0.3, generator=generator)


def build_ours(config: ModelConfig) -> GPT:
    model = GPT(config, pad_vocab(VOCAB), VOCAB)
    make_wild(model)
    return model.eval()


def publish(config: ModelConfig, ours: GPT, folder: Path) -> None:
    content = make_hf_config(config, VOCAB, bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    weights = to_hf_weights(config, ours.state_dict(), VOCAB)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def assert_same_logits(ours: GPT, published: Any) -> None:
    shape = (2, ours.config.context_length)
    tokens = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(9))
    expected = published(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours.logits(tokens)[..., :VOCAB], expected, atol=1e-4, rtol=1e-4)


def test_our_model_in_transformers(config: ModelConfig, tmp_path: Path) -> None:
    import transformers

    ours = build_ours(config)
    publish(config, ours, tmp_path)
    published, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert published.config.model_type == choose_layout(config)
    assert published.config.architectures == [type(published).__name__]
    assert published.dtype == torch.float32
    assert published.config.max_position_embeddings == config.context_length
    assert_same_logits(ours, published.eval())


def test_a_model_of_transformers_here(config: ModelConfig, tmp_path: Path) -> None:
    import transformers

    content = make_hf_config(config, VOCAB)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
    make_wild(theirs)
    theirs.save_pretrained(tmp_path)
    read = read_hf_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    assert read == config
    ours = GPT(read, pad_vocab(VOCAB), VOCAB).eval()
    published = load_file(tmp_path / "model.safetensors")
    ours.load_state_dict(from_hf_weights(published, str(choose_layout(read)), read, pad_vocab(VOCAB)), strict=True)
    assert_same_logits(ours, theirs)


def test_there_and_back_is_the_identity(config: ModelConfig) -> None:
    weights = build_ours(config).state_dict()
    returned = from_hf_weights(
        to_hf_weights(config, weights, VOCAB), str(choose_layout(config)), config, pad_vocab(VOCAB)
    )
    assert returned.keys() == weights.keys()
    for name, weight in weights.items():
        rows = VOCAB if name in ("token_embedding.weight", "head.weight") else len(weight)
        assert torch.equal(returned[name][:rows], weight[:rows]), name
        assert returned[name].is_contiguous(), name


def test_a_window_counts_its_own_place(tmp_path: Path) -> None:
    import transformers

    config = replace(QWEN3, attention_windows="3")
    publish(config, build_ours(config), tmp_path)
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert published.config.layer_types == ["sliding_attention"] * config.num_layers
    wider = replace(config, attention_windows="4")
    ours = GPT(wider, pad_vocab(VOCAB), VOCAB).eval()
    ours.load_state_dict(build_ours(config).state_dict())
    with pytest.raises(AssertionError):
        assert_same_logits(ours, published)


def test_extra_heads_are_left_behind() -> None:
    config = replace(LLAMA, mtp_heads=1)
    assert choose_layout(config) == "llama"
    weights = build_ours(config).state_dict()
    assert any(name.startswith("extra_blocks.") for name in weights)
    plain = {name: weight for name, weight in weights.items() if not name.startswith("extra_blocks.")}
    assert to_hf_weights(config, weights, VOCAB).keys() == to_hf_weights(LLAMA, plain, VOCAB).keys()


def test_experts_have_the_names_of_published_checkpoints() -> None:
    published = to_hf_weights(QWEN3_MOE, build_ours(QWEN3_MOE).state_dict(), VOCAB)
    assert published["model.layers.2.mlp.experts.4.up_proj.weight"].shape == (24, 32)
    assert published["model.layers.2.mlp.experts.4.down_proj.weight"].shape == (32, 24)
    assert published["model.layers.2.mlp.gate.weight"].shape == (5, 32)


def test_a_model_without_a_layout_is_refused_with_what_prevents_it() -> None:
    config = replace(LLAMA, value_embeddings=1)
    with pytest.raises(UserError, match="llama is the nearest, and value_embeddings = 1 prevents it"):
        to_hf_weights(config, build_ours(config).state_dict(), VOCAB)
    with pytest.raises(UserError, match="value_embeddings = 1 prevents it"):
        make_hf_config(config, VOCAB)


@pytest.mark.parametrize("layout", ["gpt2", "llama"])
def test_bare_weights_and_those_with_derived_tables_are_read_too(layout: str) -> None:
    config, prefix = (CLASSIC, "transformer.") if layout == "gpt2" else (LLAMA, "model.")
    weights = to_hf_weights(config, build_ours(config).state_dict(), VOCAB)
    expected = from_hf_weights(weights, layout, config, pad_vocab(VOCAB))
    bare = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    bare |= {"h.0.attn.bias": torch.ones(1), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    returned = from_hf_weights(bare, layout, config, pad_vocab(VOCAB))
    assert returned.keys() == expected.keys()
    assert all(torch.equal(returned[name], weight) for name, weight in expected.items())


def test_weights_that_do_not_belong_to_the_config_are_refused() -> None:
    weights = to_hf_weights(LLAMA, build_ours(LLAMA).state_dict(), VOCAB)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(UserError, match=f"no {name}, "):
        from_hf_weights({key: weights[key] for key in weights if key != name}, "llama", LLAMA, 128)
    with pytest.raises(UserError, match=r"have model\.layers\.2\.\S+ and 8 more, unknown"):
        from_hf_weights(weights, "llama", replace(LLAMA, num_layers=2), 128)
    with pytest.raises(
        UserError, match=r"layers\.0\.self_attn\.k_proj\.weight is 32 x 32, but by their config it has 16 rows"
    ):
        from_hf_weights(weights, "llama", replace(LLAMA, num_kv_heads=2), 128)
    with pytest.raises(UserError, match="100 tokens, but the tokenizer only 64"):
        from_hf_weights(weights, "llama", LLAMA, 64)
    with pytest.raises(UserError, match=r"no transformer\.wte\.weight: they are not gpt2's"):
        from_hf_weights(weights, "gpt2", CLASSIC, 128)
