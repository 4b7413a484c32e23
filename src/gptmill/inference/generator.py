"""Draws tokens from a model, one at a time, with a cache of keys and values."""

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

CHUNK = 64  # tokens of a prompt that a compiled model reads at once
LARGEST_LOGIT = 1e4
COLDEST = 1e-6  # below it, dividing by the temperature overflows, and the likeliest token is certain anyway


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is drawn from the logits; a temperature of 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    rule: SamplingRule,
    vocab_size: int,
    seed: int,
    *,
    compiled: bool = False,
    backend: str = "inductor",
) -> Iterator[int]:
    """Yields new tokens. Ids that only pad the vocabulary are never drawn.

    Once the context is full, its older half is forgotten and the rest computed anew: the cost of a token stays
    that of one token, on average, and the model always sees at least half a context.
    """
    model.eval()
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    context = model.config.context_length
    read = partial(_read_compiled, backend) if compiled else _read
    seen = list(prompt)[-context:]
    caches = build_kv_cache(model.config, 1, device)
    unread = seen
    for _ in range(max_new_tokens):
        if caches.length + len(unread) > context:
            unread = seen = seen[-max(1, context // 2) :]
            caches = build_kv_cache(model.config, 1, device)
        logits_V = read(model, torch.tensor([unread], device=device), caches)[:vocab_size]
        token = draw_token(logits_V.float(), rule, generator)
        seen.append(token)
        unread = [token]
        yield token


def _read(model: GPT, tokens_1T: Tensor, caches: KVCache) -> Tensor:
    """The logits of what follows the tokens, which follow what the caches hold."""
    return model.logits(tokens_1T, caches)[0, -1]


def _read_compiled(backend: str, model: GPT, tokens_1T: Tensor, caches: KVCache) -> Tensor:
    """The same in two shapes alone, so that nothing is compiled again for another length: texts in chunks, the last
    of them padded, and single tokens.

    What padding leaves in the caches lies at places that no token sees before they are filled anew.
    """
    read = partial(model.decode_step, compile_part=partial(_compile, backend=backend))
    size = min(CHUNK, caches.capacity)
    start = caches.length
    positions_T, _ = caches.extend(tokens_1T.shape[1])
    if tokens_1T.shape[1] == 1 and start > 0:
        return read(tokens_1T, positions_T, caches.layers)[0, -1]
    assert start == 0, "a text is read from its beginning"
    places_T = torch.arange(size, device=tokens_1T.device)
    padded_1T = F.pad(tokens_1T, (0, max(0, caches.capacity - tokens_1T.shape[1])))
    for begin in range(0, caches.length, size):
        # A chunk that would stick out of the context begins sooner, and reads some tokens a second time.
        begin = min(begin, caches.capacity - size)
        logits_1TV = read(padded_1T[:, begin : begin + size].contiguous(), begin + places_T, caches.layers)
    return logits_1TV[0, caches.length - 1 - begin]


@cache
def _compile(part: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiled once for as long as the process lives; models are arguments, and keep nothing of it."""
    return torch.compile(part, dynamic=False, backend=backend)


def draw_token(logits_V: Tensor, rule: SamplingRule, generator: torch.Generator) -> int:
    """One token from the logits under the rule. A diverged model's logits, not finite, must not end its run."""
    logits_V = torch.nan_to_num(logits_V).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    if rule.temperature < COLDEST:
        return int(logits_V.argmax())
    logits_V = (logits_V - logits_V.max()) / rule.temperature
    if rule.top_k is not None:
        smallest = torch.topk(logits_V, min(rule.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if rule.top_p is not None:
        logits_V = _keep_nucleus(logits_V, rule.top_p)
    return int(torch.multinomial(logits_V.softmax(dim=-1), 1, generator=generator))


def _keep_nucleus(logits_V: Tensor, top_p: float) -> Tensor:
    """Masks all but the smallest set of likeliest tokens that holds `top_p` of the probability."""
    sorted_V, order_V = logits_V.sort(descending=True)
    probabilities_V = sorted_V.softmax(dim=-1)
    before_V = probabilities_V.cumsum(dim=-1) - probabilities_V
    dropped_V = torch.empty_like(before_V, dtype=torch.bool).scatter_(0, order_V, before_V >= top_p)
    return logits_V.masked_fill(dropped_V, -torch.inf)
