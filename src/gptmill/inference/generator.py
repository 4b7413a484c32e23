"""Draws tokens from a model, one at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.models.cache import build_caches
from gptmill.models.gpt import GPT

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
    model: GPT, prompt: Sequence[int], max_new_tokens: int, rule: SamplingRule, vocab_size: int, seed: int
) -> Iterator[int]:
    """Yields new tokens. Ids that only pad the vocabulary are never drawn.

    Once the context is full, its older half is forgotten and the rest computed anew: the cost of a token stays
    that of one token, on average, and the model always sees at least half a context.
    """
    model.eval()
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    context = model.config.context_length
    seen = list(prompt)[-context:]
    caches = build_caches(model.config, 1, device)
    unread = seen
    for _ in range(max_new_tokens):
        if caches[0].length + len(unread) > context:
            unread = seen = seen[-max(1, context // 2) :]
            caches = build_caches(model.config, 1, device)
        logits_V = model.logits(torch.tensor([unread], device=device), caches)[0, -1, :vocab_size]
        token = draw_token(logits_V.float(), rule, generator)
        seen.append(token)
        unread = [token]
        yield token


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
