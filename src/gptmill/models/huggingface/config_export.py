"""Makes the config.json of a Hugging Face checkpoint from a model's config.

Written for `transformers` 5, with the keys that 4.51 and later read instead (`rope_theta`, `rope_scaling`).
Sliding-window attention is read by `transformers`, and by vLLM where all layers have it; llama.cpp ignores it.
"""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.model import LinearScaling, Llama3Scaling, ModelConfig, Moe, Rope
from gptmill.models.huggingface.layouts import choose_layout, explain_no_layout

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Our field names and those of config.json, where the values are the same.
GPT2_NAMES = {
    "num_layers": "n_layer",
    "embd_size": "n_embd",
    "num_heads": "n_head",
    "context_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "ffn_size": "n_inner",
}
LLAMA_NAMES = {
    "num_layers": "num_hidden_layers",
    "embd_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_size": "intermediate_size",
}
MOE_NAMES = {
    **LLAMA_NAMES,
    "ffn_size": "moe_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}
NAMES = {
    "gpt2": GPT2_NAMES,
    "llama": LLAMA_NAMES,
    "mistral": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "qwen3_moe": MOE_NAMES,
}
# Options of config.json that gptmill does not have, with the value that matches what it does.
FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "llama": {"hidden_act": "silu"},
    "mistral": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu", "attention_bias": False},
    "qwen3_moe": {
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
LLAMA3_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def make_hf_config(
    config: ModelConfig,
    vocab_size: int,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The content of config.json. Raises UserError for a model that no layout can represent."""
    layout = choose_layout(config)
    if layout is None:
        raise UserError(explain_no_layout(config))
    values = _resolve_values(config)
    return {
        "architectures": [ARCHITECTURES[layout]],
        "model_type": layout,
        "vocab_size": vocab_size,
        **{theirs: values[ours] for ours, theirs in NAMES[layout].items()},
        **FIXED[layout],
        **(_make_gpt2_options(config) if layout == "gpt2" else _make_rope_options(config, layout)),
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _resolve_values(config: ModelConfig) -> dict[str, Any]:
    """Fields by name, with those that default to a function of others filled in."""
    values = vars(config) | vars(config.feed_forward)
    sizes = {"num_kv_heads": config.kv_heads, "head_size": config.head_width, "ffn_size": config.hidden_size}
    return values | sizes


def _make_gpt2_options(config: ModelConfig) -> dict[str, Any]:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    return {"n_ctx": config.context_length, **dropouts}  # llama.cpp reads n_ctx


def _make_rope_options(config: ModelConfig, layout: str) -> dict[str, Any]:
    assert isinstance(config.positions, Rope)
    scaling = _make_scaling(config.positions)
    options: dict[str, Any] = {
        "attention_dropout": config.dropout,
        "rope_theta": config.positions.rope_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.positions.rope_base, **(scaling or {"rope_type": "default"})},
    }
    if layout == "llama":
        return options | {"attention_bias": config.bias, "mlp_bias": config.bias}
    if isinstance(config.feed_forward, Moe):  # for software that expects the width of a dense layer in every model
        options["intermediate_size"] = config.feed_forward.experts_per_token * config.hidden_size
    return options | _make_windows(config, layout)


def _make_scaling(positions: Rope) -> dict[str, Any] | None:
    scaling = positions.rope_scaling
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.rope_factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.rope_factor,
            "original_max_position_embeddings": scaling.rope_original_context,
            **LLAMA3_BOUNDS,
        }
    return None


def _make_windows(config: ModelConfig, layout: str) -> dict[str, Any]:
    windows = config.list_windows()
    lengths = [window for window in windows if window is not None]
    if layout == "mistral":
        return {"sliding_window": lengths[0] if lengths else None}
    content: dict[str, Any] = {"use_sliding_window": bool(lengths), "sliding_window": lengths[0] if lengths else None}
    if layout == "qwen3":
        content["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
        # Software that does not know layer_types uses sliding windows from this layer on.
        content["max_window_layers"] = next((layer for layer, window in enumerate(windows) if window), len(windows))
    return content
