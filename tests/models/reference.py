"""The model once more, as plainly as can be: one query after another, softmax by hand. For the tests beside.

It takes the weights by name and shares no line with the model.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gptmill.config.model import (
    Gelu,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Relu2,
    RmsNorm,
    Rope,
    SwiGlu,
)

Weights = Mapping[str, Tensor]


def compute_logits(config: ModelConfig, weights: Weights, row: list[int], starts: list[int] | None) -> Tensor:
    """The logits of one row; `starts` are the places where each token's document begins."""
    embedding = weights["token_embedding.weight"]
    stream = [embedding[token] for token in row]
    if isinstance(config.positions, LearnedPositions):
        places = range(len(row)) if starts is None else [t - start for t, start in enumerate(starts)]
        stream = [x + weights["position_embedding.weight"][place] for x, place in zip(stream, places, strict=True)]
    windows = [word.strip() for word in (config.attention_windows or "full").split(",")]
    for layer in range(config.num_layers):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        window = windows[layer % len(windows)]
        reach = len(row) if window == "full" else int(window)
        table = None
        if layer < config.value_embeddings:
            table = weights[f"value_embeddings.{layer}.weight"]
        elif config.num_layers - 1 - layer < config.value_embeddings:
            table = weights[f"value_embeddings.{config.num_layers - 1 - layer}.weight"]
        extra = None if table is None else [table[token] for token in row]
        normed = [_norm(config, own, "attention_norm", x) for x in stream]
        attended = _attend(config, own, normed, reach, starts, extra)
        stream = [x + y for x, y in zip(stream, attended, strict=True)]
        stream = [x + _feed_forward(config, own, _norm(config, own, "mlp_norm", x)) for x in stream]
    head = embedding if config.tied_head else weights["head.weight"]
    logits = torch.stack([head @ _norm(config, weights, "final_norm", x) for x in stream])
    return logits if config.logit_softcap is None else config.logit_softcap * (logits / config.logit_softcap).tanh()


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = weights[f"{name}.weight"] @ x
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    centred = x if isinstance(config.norm, RmsNorm) else x - x.mean()
    y = centred / (centred.square().mean() + config.norm_eps).sqrt() * weights[f"{name}.weight"]
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm_head(config: ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.square().mean() + config.norm_eps).sqrt() * weight


def _turn(rope: Rope, x: Tensor, place: int) -> Tensor:
    """Pairs as complex numbers, turned by multiplying."""
    half = len(x) // 2
    turned = []
    for pair in range(half):
        turn = cmath.exp(1j * place * _find_frequency(rope, pair, len(x)))
        a, b = x[pair], x[pair + half]
        turned.append((a * turn.real - b * turn.imag, a * turn.imag + b * turn.real))
    return torch.stack([a for a, _ in turned] + [b for _, b in turned])


def _find_frequency(rope: Rope, pair: int, width: int) -> float:
    """As Meta's code has it, by wavelengths."""
    frequency = float(rope.rope_base ** (-2 * pair / width))
    scaling = rope.rope_scaling
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.rope_factor
    if not isinstance(scaling, Llama3Scaling):
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.rope_original_context / 4:
        return frequency
    if wavelength > scaling.rope_original_context / 1:
        return frequency / scaling.rope_factor
    smooth = (scaling.rope_original_context / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / scaling.rope_factor + smooth * frequency


def _attend(
    config: ModelConfig,
    weights: Weights,
    stream: list[Tensor],
    reach: int,
    starts: list[int] | None,
    extra: list[Tensor] | None,
) -> list[Tensor]:
    width, heads, kv_heads = config.head_width, config.num_heads, config.kv_heads
    queries: list[list[Tensor]] = []
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    for place, x in enumerate(stream):
        parts = list(_linear(weights, "attention.qkv", x).split(width))
        q, k, v = parts[:heads], parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        if config.qk_norm:
            q = [_norm_head(config, weights["attention.query_norm.weight"], head) for head in q]
            k = [_norm_head(config, weights["attention.key_norm.weight"], head) for head in k]
        if isinstance(config.positions, Rope):
            q, k = ([_turn(config.positions, head, place) for head in part] for part in (q, k))
        if extra is not None:
            own = extra[place].split(width)
            v = [v[h] + weights["attention.value_gate"][h] * own[h] for h in range(kv_heads)]
        queries.append(q), keys.append(k), values.append(v)
    results = []
    for t in range(len(stream)):
        seen = [s for s in range(t + 1) if t - s < reach and (starts is None or starts[s] == starts[t])]
        outputs = []
        for head in range(heads):
            source = head // (heads // kv_heads)
            grades = [(queries[t][head] @ keys[s][source] / math.sqrt(width)).exp() for s in seen]
            shares = [grade / sum(grades) for grade in grades]
            outputs.append(sum(share * values[s][source] for share, s in zip(shares, seen, strict=True)))
        results.append(_linear(weights, "attention.proj", torch.cat(outputs)))
    return results


def _feed_forward(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    kind = config.feed_forward
    if isinstance(kind, SwiGlu):
        both = _linear(weights, "mlp.gate_up", x)
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        return _linear(weights, "mlp.proj", gate / (1 + (-gate).exp()) * up)
    wide = _linear(weights, "mlp.up", x)
    if isinstance(kind, Relu2):
        return _linear(weights, "mlp.proj", wide.clamp(min=0) ** 2)
    assert isinstance(kind, Gelu)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return _linear(weights, "mlp.proj", 0.5 * wide * (1 + inner.tanh()))
