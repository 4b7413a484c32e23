"""config.json: round trips, files of earlier releases, and unsupported values, each named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.errors import UserError
from gptmill.config.model import Gelu, LinearScaling, Llama3Scaling, ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.config_import import read_hf_config

CLASSIC = ModelConfig()
LLAMA = replace(CLASSIC, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu())
LLAMA3 = replace(LLAMA, positions=Rope(500_000.0, Llama3Scaling(8.0, 8192)), context_length=131_072)
QWEN3 = replace(LLAMA, qk_norm=True, num_kv_heads=4, head_size=128)
MOE = replace(QWEN3, feed_forward=Moe(num_experts=16, experts_per_token=4))
MODELS = {
    "gpt2": CLASSIC,
    "gpt2 wide": replace(CLASSIC, feed_forward=Gelu(ffn_size=2048)),
    "llama": LLAMA,
    "llama linear": replace(LLAMA, positions=Rope(1e6, LinearScaling(2.0)), tied_head=False, bias=True),
    "llama llama3": LLAMA3,
    "qwen3": QWEN3,
    "qwen3 windows": replace(QWEN3, attention_windows="256,256,full"),
    "qwen3 all windows": replace(QWEN3, attention_windows="256"),
    "moe": MOE,
    "moe windows": replace(MOE, attention_windows="256"),
}
# As published: huggingface.co/openai-community/gpt2, meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B, Qwen/Qwen3-30B-A3B.
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-05} | {
    "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257
}  # fmt: skip
LLAMA_1B = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "head_dim": 64, "hidden_act": "silu"} | {
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"},
}  # fmt: skip
QWEN3_06B = {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu"} | {
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B = QWEN3_06B | {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    content = json.loads(json.dumps(make_hf_config(config, 50_257)))
    assert read_hf_config(content) == config
    of_earlier_releases = {name: value for name, value in content.items() if name != "rope_parameters"}
    assert read_hf_config(of_earlier_releases) == config
    of_later_releases = {name: value for name, value in content.items() if name not in ("rope_theta", "rope_scaling")}
    assert read_hf_config(of_later_releases) == config


def test_published_models_are_read() -> None:
    assert read_hf_config(GPT2) == CLASSIC
    modern = replace(LLAMA, num_layers=16, embd_size=2048, num_heads=32, num_kv_heads=8, context_length=131_072)
    positions = Rope(500_000.0, Llama3Scaling(32.0, 8192))
    assert read_hf_config(LLAMA_1B) == replace(modern, positions=positions, feed_forward=SwiGlu(8192))
    small = replace(LLAMA, num_layers=28, embd_size=1024, num_heads=16, num_kv_heads=8, context_length=40_960)
    small = replace(small, head_size=128, qk_norm=True, norm_eps=1e-6, positions=Rope(1e6), feed_forward=SwiGlu(3072))
    assert read_hf_config(QWEN3_06B) == small
    large = replace(small, num_layers=48, embd_size=2048, num_heads=32, num_kv_heads=4, tied_head=False)
    assert read_hf_config(QWEN3_30B) == replace(large, feed_forward=Moe(128, 8, 768))


def test_windows_from_some_layer_on() -> None:
    content = QWEN3_06B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 26}
    assert read_hf_config(content).list_windows() == (None,) * 26 + (512, 512)
    written = make_hf_config(read_hf_config(content), 151_936)
    assert (written["max_window_layers"], written["sliding_window"]) == (26, 512)
    assert written["layer_types"] == ["full_attention"] * 26 + ["sliding_attention"] * 2
    assert read_hf_config(content | {"sliding_window": 40_960}).attention_windows is None


STRANGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GPT2, {"model_type": "gemma"}, "model_type 'gemma', and gptmill reads gpt2, llama, mistral, qwen3, qwen3_moe"),
    (GPT2, {"activation_function": "relu"}, "activation_function = relu"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    (GPT2, {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    (GPT2, {"n_head": 7}, "num_heads = 7: does not divide embd_size 768"),
    (GPT2, {"n_layer": "many"}, "num_layers = 'many': expected a whole number"),
    (GPT2, {"n_layer": 0}, "num_layers = 0: must be between 1 and 10,000"),
    (GPT2, {"n_layer": 10**15}, "n_layer = 1000000000000000"),
    (LLAMA_1B, {"hidden_act": "gelu"}, "hidden_act = gelu"),
    (LLAMA_1B, {"mlp_bias": True}, "mlp_bias = True with attention_bias = False"),
    (LLAMA_1B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = yarn"),
    (LLAMA_1B, {"rope_scaling": LLAMA_1B["rope_scaling"] | {"low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
    (LLAMA_1B, {"rope_scaling": {"rope_type": "linear"}}, "no factor"),
    (LLAMA_1B, {"rope_scaling": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters = "),
    (LLAMA_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (LLAMA_1B, {"num_attention_heads": 24}, "no num_heads = 24"),
    (LLAMA_1B, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (QWEN3_06B, {"attention_bias": True}, "attention_bias = True"),
    (QWEN3_06B, {"use_sliding_window": True, "sliding_window": "far"}, "sliding_window = far"),
    (QWEN3_06B, {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["chunked"] * 28}, "layer_types = "),
    (QWEN3_30B, {"attention_bias": True}, "attention_bias = True"),
    (QWEN3_30B, {"norm_topk_prob": False}, "norm_topk_prob = False"),
    (QWEN3_30B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    (QWEN3_30B, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    (QWEN3_30B, {"num_experts_per_tok": 200}, "experts_per_token = 200: exceeds num_experts 128"),
]


@pytest.mark.parametrize(("content", "changes", "message"), STRANGE, ids=[case[2] for case in STRANGE])
def test_values_without_a_part_here_are_named(content: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hf_config(content | changes)


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="no hidden_size"):
        read_hf_config({name: value for name, value in LLAMA_1B.items() if name != "hidden_size"})
    with pytest.raises(UserError, match="norm_topk_prob = False"):
        read_hf_config({name: value for name, value in QWEN3_30B.items() if name != "norm_topk_prob"})
    with pytest.raises(UserError, match="model_type None"):
        read_hf_config(["gpt2"])
