"""The cache of keys and values: logits are the same with it, however the tokens are fed."""

from __future__ import annotations

import pytest
import torch
from compositions import COMPOSITIONS, CONTEXT, TINY, build_wild, draw_tokens

from gptmill.config.model import ModelConfig
from gptmill.models.kv_cache import build_kv_cache

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [1, 4, 1, 6], [3, 3]], ids=str)
@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
@torch.no_grad()
def test_logits_are_the_same_token_by_token_in_chunks_and_at_once(config: ModelConfig, chunks: list[int]) -> None:
    model, tokens = build_wild(config), draw_tokens(3, sum(chunks), seed=2)
    caches = build_kv_cache(config, 3, CPU)
    parts = [model.logits(chunk, caches) for chunk in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), atol=2e-5, rtol=2e-5)
    assert caches.length == sum(chunks)


@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
@torch.no_grad()
def test_what_lies_at_places_to_come_is_not_seen(config: ModelConfig) -> None:
    """As a compiled model leaves it: all places in view, and padding at those that no token has filled."""
    model, tokens = build_wild(config), draw_tokens(1, 7, seed=2)
    layers = build_kv_cache(config, 1, CPU).layers
    padded = torch.cat([tokens[:, :5], draw_tokens(1, 5, seed=3)], dim=1)
    parts = [model.decode_step(padded, torch.arange(10), layers)[:, :5]]
    parts += [model.decode_step(tokens[:, [place]], torch.tensor([place]), layers) for place in (5, 6)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_caches_of_two_texts_do_not_mix() -> None:
    model, texts = build_wild(), draw_tokens(2, 1, 6, seed=3)
    caches = [build_kv_cache(TINY, 1, CPU) for _ in texts]
    for place in range(6):
        last = [model.logits(text[:, place : place + 1], cache) for text, cache in zip(texts, caches, strict=True)]
    for text, logits in zip(texts, last, strict=True):
        torch.testing.assert_close(logits, model.logits(text)[:, -1:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_full_cache_takes_no_more() -> None:
    model, caches = build_wild(), build_kv_cache(TINY, 1, CPU)
    model.logits(torch.zeros(1, CONTEXT, dtype=torch.int64), caches)
    with pytest.raises(AssertionError, match="full"):
        model.logits(torch.zeros(1, 1, dtype=torch.int64), caches)


def test_heads_that_are_shared_are_kept_once() -> None:
    shared = build_kv_cache(COMPOSITIONS["grouped queries"], 1, CPU).layers[0]
    assert shared.keys_BHSD.shape == shared.values_BHSD.shape == (1, 2, CONTEXT, 4)
