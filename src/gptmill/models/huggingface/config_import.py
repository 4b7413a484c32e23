"""Reads an untrusted Hugging Face config.json into a model's config, or says why gptmill does not support it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.model import ModelConfig
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.settings import read_settings
from gptmill.config.validation import find_problems
from gptmill.models.huggingface.config_export import FIXED, LLAMA3_BOUNDS, NAMES
from gptmill.models.huggingface.layouts import LAYOUTS, REQUIRED, find_obstacles

# The defaults of `transformers` for missing keys. Sizes must be given, except those that follow from others.
LLAMA_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "head_dim": None,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "n_inner": None},
    "llama": {**LLAMA_DEFAULTS, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    "mistral": {**LLAMA_DEFAULTS, "num_key_value_heads": 8, "use_sliding_window": True, "sliding_window": 4096},
    "qwen3": {**LLAMA_DEFAULTS, "head_dim": 128},
    "qwen3_moe": {**LLAMA_DEFAULTS, "norm_topk_prob": False},
}
FIXED_ALIASES: dict[str, Any] = {"activation_function": "gelu_pytorch_tanh", "mlp_only_layers": None}
MAX_LAYERS = 10_000  # a damaged file may name any number
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_hf_config(content: Any) -> ModelConfig:
    """The model that a config.json describes; raises UserError with the first value that gptmill does not support.

    Dropout is not read: it belongs to the run that trained the weights, not to the model.
    """
    layout = content.get("model_type") if isinstance(content, dict) else None
    if layout not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise UserError(
            f"config.json has model_type {layout!r:.100}, and gptmill reads {known}; use a model of those types"
        )
    content = FIXED[layout] | DEFAULTS[layout] | _rename_experts(content)
    _check_supported(content, layout)
    values = dict(REQUIRED[layout])
    values |= {ours: _require(content, theirs) for ours, theirs in NAMES[layout].items()}
    if isinstance(values["num_layers"], int) and values["num_layers"] > MAX_LAYERS:
        raise _make_error(NAMES[layout]["num_layers"], values["num_layers"])
    if layout != "gpt2":
        values |= _read_rope(content)
    if layout == "llama":
        values["bias"] = content["attention_bias"]
    elif layout in ("mistral", "qwen3", "qwen3_moe"):
        values["attention_windows"] = _read_windows(content, layout)
    config = drop_default_sizes(_build(values))
    if obstacles := find_obstacles(config, layout):
        raise UserError(f"config.json is of type {layout}, which has no {obstacles[0]}; use another model")
    return config


def _rename_experts(content: dict[str, Any]) -> dict[str, Any]:
    """Renames num_local_experts, which `transformers` 5 saves, to the num_experts of Qwen's own files."""
    is_local = "num_local_experts" in content and "num_experts" not in content
    return content | {"num_experts": content["num_local_experts"]} if is_local else content


def _check_supported(content: dict[str, Any], layout: str) -> None:
    """Raises UserError for options that gptmill does not have."""
    for name, value in FIXED[layout].items():
        if content[name] != value and content[name] != FIXED_ALIASES.get(name, value):
            raise _make_error(name, content[name])
    if content.get("quantization_config") is not None:
        raise UserError("config.json has a quantization_config, and gptmill reads unquantized weights only; use those")
    if layout == "llama" and content["attention_bias"] != content["mlp_bias"]:
        raise _make_error("mlp_bias", f"{content['mlp_bias']} with attention_bias = {content['attention_bias']}")


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """RoPE's options, under the keys of `transformers` 5 or of earlier releases."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _make_error("rope_parameters", rope)
    rope = {"rope_theta": content["rope_theta"]} | rope
    partial = rope.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _make_error("partial_rotary_factor", partial)
    kind = rope.get("rope_type", rope.get("type", "default"))
    values = {"rope_base": rope["rope_theta"], "rope_scaling": kind}
    if kind == "default":
        return values | {"rope_scaling": "none"}
    if kind not in ("linear", "llama3"):
        raise _make_error("rope_type", kind)
    values["rope_factor"] = _require(rope, "factor")
    if kind == "llama3":
        for name, value in LLAMA3_BOUNDS.items():
            if rope.get(name) != value:
                raise _make_error(name, rope.get(name))
        original = rope.get("original_max_position_embeddings")
        values["rope_original_context"] = content["max_position_embeddings"] if original is None else original
    return values


def _read_windows(content: dict[str, Any], layout: str) -> str | None:
    """The shortest pattern of attention windows that the layers repeat."""
    window, num_layers = content["sliding_window"], content["num_hidden_layers"]
    if not content["use_sliding_window"] or window is None:
        return None
    for name in ("sliding_window", "num_hidden_layers", "max_position_embeddings", "max_window_layers"):
        if not isinstance(content[name], int):
            raise _make_error(name, content[name])
    if window >= content["max_position_embeddings"]:
        return None
    if layout in ("mistral", "qwen3_moe"):
        return str(window)
    types = content["layer_types"]
    if types is None:
        first = content["max_window_layers"]
        types = [LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(word in LAYER_TYPES for word in types):
        raise _make_error("layer_types", types)
    words = [str(window) if word == "sliding_attention" else "full" for word in types]
    lengths = range(1, num_layers + 1)
    period = next(length for length in lengths if words == (words[:length] * num_layers)[:num_layers])
    return None if words == ["full"] * num_layers else ",".join(words[:period])


def _build(values: dict[str, Any]) -> ModelConfig:
    config = build_config(ModelConfig, read_settings(ModelConfig, values, "config.json"))
    own = list_values(config)
    if problems := [problem for problem in find_problems(RunConfig(model=config)) if problem.where.split()[0] in own]:
        raise ConfigError(problems)
    return config


def drop_default_sizes(config: ModelConfig) -> ModelConfig:
    """Removes sizes that follow from others, as in a config written by hand."""
    own = config.feed_forward
    plain = replace(own, ffn_size=None) if hasattr(own, "ffn_size") else own  # a registered variant may have none
    is_same_width = replace(config, feed_forward=plain).hidden_size == config.hidden_size
    return replace(
        config,
        num_kv_heads=None if config.kv_heads == config.num_heads else config.num_kv_heads,
        head_size=None if config.head_width * config.num_heads == config.embd_size else config.head_size,
        feed_forward=plain if is_same_width else config.feed_forward,
    )


def _require(content: dict[str, Any], name: str) -> Any:
    if name not in content:
        raise UserError(f"config.json has no {name}; use a complete file")
    return content[name]


def _make_error(name: str, value: object) -> UserError:
    return UserError(f"config.json has {name} = {value!s:.100}, which gptmill does not support; use another model")
