"""Which Hugging Face layout a model can be exported to, or which settings prevent it. Needs no weights and no torch."""

from __future__ import annotations

from typing import Any

from gptmill.config.model import ModelConfig
from gptmill.config.schema import list_values
from gptmill.config.value_syntax import parse_windows

LAYOUTS = ("gpt2", "llama", "mistral", "qwen3", "qwen3_moe")

# The values that each layout requires. Fields that are not listed may have any value; MTP heads are not exported.
EVERYWHERE: dict[str, Any] = {
    "architecture": "gpt",
    "attention": "softmax",
    "logit_softcap": None,
    "value_embeddings": 0,
}
ROTARY: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope"}
REQUIRED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm",
        "norm_bias": True,
        "positions": "learned",
        "feed_forward": "gelu",
        "bias": True,
        "qk_norm": False,
        "tied_head": True,
    },
    "llama": {**ROTARY, "feed_forward": "swiglu", "qk_norm": False},
    "mistral": {**ROTARY, "feed_forward": "swiglu", "qk_norm": False, "bias": False},
    "qwen3": {**ROTARY, "feed_forward": "swiglu", "qk_norm": True, "bias": False},
    "qwen3_moe": {**ROTARY, "feed_forward": "moe", "qk_norm": True, "bias": False},
}


def choose_layout(config: ModelConfig) -> str | None:
    """The first layout that can represent the model; None if there is none."""
    return next((layout for layout in LAYOUTS if not find_obstacles(config, layout)), None)


def find_obstacles(config: ModelConfig, layout: str) -> list[str]:
    """The settings that a layout cannot represent, each as "name = value"."""
    values, required = list_values(config), REQUIRED[layout] | EVERYWHERE
    obstacles = [f"{name} = {values[name]}" for name in required if name in values and values[name] != required[name]]
    return obstacles + [
        phrase for phrase in (_find_head_obstacle(config, layout), _find_window_obstacle(config, layout)) if phrase
    ]


def describe_layout(config: ModelConfig) -> str:
    """The layout's name, or "none" and the settings that prevent the nearest."""
    layout = choose_layout(config)
    return layout or f"none: {', '.join(find_obstacles(config, _find_nearest(config)))}"


def explain_no_layout(config: ModelConfig) -> str:
    """Why the model has no Hugging Face layout, as an error sentence."""
    nearest = _find_nearest(config)
    obstacles = find_obstacles(config, nearest)
    assert obstacles, nearest
    verb = "prevents" if len(obstacles) == 1 else "prevent"
    return (
        f"no Hugging Face layout can represent this model: {nearest} is the nearest, and "
        f"{_enumerate(obstacles)} {verb} it; only a model that was trained with {_list_flags(config, nearest)} can be "
        f"exported"
    )


def _list_flags(config: ModelConfig, layout: str) -> str:
    """The flags that bring the model into the layout."""
    values, required = list_values(config), REQUIRED[layout] | EVERYWHERE
    changes = {name: value for name, value in required.items() if name in values and values[name] != value}
    if _find_head_obstacle(config, layout):
        is_gpt2 = layout == "gpt2"
        changes |= {"num_kv_heads": None, "head_size": None} if is_gpt2 else {"num_heads": "a divisor of embd_size"}
    if _find_window_obstacle(config, layout):
        changes["attention_windows"] = None
    flags = [
        f"--{'' if value else 'no_'}{name}"
        if isinstance(value, bool)
        else f"--{name} {'none' if value is None else value}"
        for name, value in changes.items()
    ]
    return " ".join(flags)


def _find_nearest(config: ModelConfig) -> str:
    """The layout with the fewest obstacles; among several, one with the model's kind of feed-forward layer."""
    kind = config.feed_forward.tag
    return min(
        LAYOUTS, key=lambda layout: (len(find_obstacles(config, layout)), REQUIRED[layout]["feed_forward"] != kind)
    )


def _find_head_obstacle(config: ModelConfig, layout: str) -> str:
    if layout == "gpt2" and config.kv_heads != config.num_heads:
        return f"num_kv_heads = {config.num_kv_heads}"
    if layout == "gpt2" and config.head_width * config.num_heads != config.embd_size:
        return f"head_size = {config.head_size}"
    if layout == "llama" and config.embd_size % config.num_heads:
        return f"num_heads = {config.num_heads} (does not divide embd_size {config.embd_size})"
    return ""


def _find_window_obstacle(config: ModelConfig, layout: str) -> str:
    windows = {None} if config.attention_windows is None else set(parse_windows(config.attention_windows))
    phrase = f"attention_windows = {config.attention_windows}"
    if layout == "qwen3":
        return f"{phrase} (windows of different lengths)" if len(windows - {None}) > 1 else ""
    if layout in ("mistral", "qwen3_moe"):
        return f"{phrase} (not the same in every layer)" if len(windows) > 1 else ""
    return phrase if windows != {None} else ""


def _enumerate(phrases: list[str]) -> str:
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)
