"""Autoregressive generation with a KV cache: prefill of the prompt, then one decode step per token.

B batch (always 1 here), T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.gpt import GPT
from gptmill.models.kv_cache import KVCache, build_kv_cache
from gptmill.models.language_model import LanguageModel

PREFILL_CHUNK = 64  # prompt tokens per forward pass of a compiled model
MAX_LOGIT = 1e4
MIN_TEMPERATURE = 1e-6  # below it, dividing by the temperature overflows; greedy decoding gives the same token


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample the next token from the logits; temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingConfig,
    vocab_size: int,
    seed: int,
    *,
    compiled: bool = False,
    backend: str = "inductor",
) -> Iterator[int]:
    """Yields new tokens; ids that only pad the vocabulary are never sampled.

    A model that has no KV cache, because its architecture or attention is a plug-in's, reads the whole context anew for
    every token.

    When the context is full, its older half is dropped and the rest prefilled again: the amortised cost stays that of
    one token, and the model always sees at least half a context.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    context = model.config.context_length
    if not isinstance(model, GPT) or not model.has_kv_cache:
        yield from _generate_uncached(model, list(prompt), max_new_tokens, sampling, vocab_size, generator)
        return
    compute_logits = partial(_compute_logits_compiled, backend) if compiled else _compute_logits
    tokens = list(prompt)[-context:]
    kv_cache = build_kv_cache(model.config, 1, device)
    uncached = tokens
    for _ in range(max_new_tokens):
        if kv_cache.length + len(uncached) > context:
            uncached = tokens = tokens[-max(1, context // 2) :]
            kv_cache = build_kv_cache(model.config, 1, device)
        logits_V = compute_logits(model, torch.tensor([uncached], device=device), kv_cache)[:vocab_size]
        token = sample_token(logits_V.float(), sampling, generator)
        tokens.append(token)
        uncached = [token]
        yield token


def _generate_uncached(
    model: LanguageModel,
    tokens: list[int],
    max_new_tokens: int,
    sampling: SamplingConfig,
    vocab_size: int,
    generator: torch.Generator,
) -> Iterator[int]:
    for _ in range(max_new_tokens):
        tokens = tokens[-model.config.context_length :]
        logits_V = model.logits(torch.tensor([tokens], device=generator.device))[0, -1, :vocab_size]
        tokens.append(sample_token(logits_V.float(), sampling, generator))
        yield tokens[-1]


def _compute_logits(model: GPT, tokens_1T: Tensor, kv_cache: KVCache) -> Tensor:
    """Appends the tokens to the KV cache; returns the logits of the next token."""
    return model.logits(tokens_1T, kv_cache)[0, -1]


def _compute_logits_compiled(backend: str, model: GPT, tokens_1T: Tensor, kv_cache: KVCache) -> Tensor:
    """The same with only two static shapes, so that no length triggers a recompilation: prefill in padded chunks,
    decode with single tokens.

    Padding leaves entries in the KV cache at positions that are overwritten before any token attends to them.
    """
    forward = partial(model.decode_step, compile_part=partial(_compile, backend=backend))
    size = min(PREFILL_CHUNK, kv_cache.capacity)
    start = kv_cache.length
    positions_T, _ = kv_cache.extend(tokens_1T.shape[1])
    if tokens_1T.shape[1] == 1 and start > 0:
        return forward(tokens_1T, positions_T, kv_cache.layers)[0, -1]
    assert start == 0, "prefill needs an empty KV cache"
    chunk_T = torch.arange(size, device=tokens_1T.device)
    padded_1T = F.pad(tokens_1T, (0, max(0, kv_cache.capacity - tokens_1T.shape[1])))
    for first in range(0, kv_cache.length, size):
        # A chunk that would reach past the context starts earlier and recomputes some tokens.
        first = min(first, kv_cache.capacity - size)
        logits_1TV = forward(padded_1T[:, first : first + size].contiguous(), first + chunk_T, kv_cache.layers)
    return logits_1TV[0, kv_cache.length - 1 - first]


@cache
def _compile(part: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiles a part once per process; models are passed as arguments and hold no compiled code."""
    return torch.compile(part, dynamic=False, backend=backend)


def sample_token(logits_V: Tensor, sampling: SamplingConfig, generator: torch.Generator) -> int:
    """Samples one token. Accepts non-finite logits, so that samples of a diverged model do not end its run."""
    logits_V = torch.nan_to_num(logits_V).clamp(-MAX_LOGIT, MAX_LOGIT)
    if sampling.temperature < MIN_TEMPERATURE:
        return int(logits_V.argmax())
    logits_V = (logits_V - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None:
        smallest = torch.topk(logits_V, min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if sampling.top_p is not None:
        logits_V = _apply_top_p(logits_V, sampling.top_p)
    return int(torch.multinomial(logits_V.softmax(dim=-1), 1, generator=generator))


def _apply_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """Nucleus sampling: masks all but the smallest set of most likely tokens whose probability reaches `top_p`."""
    sorted_V, order_V = logits_V.sort(descending=True)
    probabilities_V = sorted_V.softmax(dim=-1)
    before_V = probabilities_V.cumsum(dim=-1) - probabilities_V
    dropped_V = torch.empty_like(before_V, dtype=torch.bool).scatter_(0, order_V, before_V >= top_p)
    return logits_V.masked_fill(dropped_V, -torch.inf)
