"""The cache of keys and values: logits are the same with it, however the tokens are fed."""

from __future__ import annotations

import pytest
import torch

from gptmill.config.run import ModelConfig
from gptmill.models.cache import build_caches
from gptmill.models.gpt import GPT, build_gpt

CONFIG = ModelConfig(num_layers=3, embd_size=16, num_heads=2, context_length=12)
VOCAB = 50
CPU = torch.device("cpu")


def build_wild() -> GPT:
    """Weights far larger than fresh ones, so that attention is not almost uniform."""
    model = build_gpt(CONFIG, VOCAB, seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


@pytest.mark.parametrize("chunks", [[1] * 12, [12], [5, 7], [1, 4, 1, 6], [11, 1], [3, 3]])
@torch.no_grad()
def test_logits_are_the_same_token_by_token_in_chunks_and_at_once(chunks: list[int]) -> None:
    model = build_wild()
    tokens = torch.randint(VOCAB, (3, sum(chunks)), generator=torch.Generator().manual_seed(2))
    caches = build_caches(CONFIG, 3, CPU)
    parts = [model.logits(chunk, caches) for chunk in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), atol=1e-5, rtol=1e-5)
    assert {cache.length for cache in caches} == {sum(chunks)}


@torch.no_grad()
def test_caches_of_two_texts_do_not_mix() -> None:
    model = build_wild()
    texts = torch.randint(VOCAB, (2, 1, 6), generator=torch.Generator().manual_seed(3))
    caches = [build_caches(CONFIG, 1, CPU) for _ in texts]
    for place in range(6):
        last = [model.logits(text[:, place : place + 1], cache) for text, cache in zip(texts, caches, strict=True)]
    for text, logits in zip(texts, last, strict=True):
        torch.testing.assert_close(logits, model.logits(text)[:, -1:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_full_cache_takes_no_more() -> None:
    model, caches = build_wild(), build_caches(CONFIG, 1, CPU)
    model.logits(torch.zeros(1, CONFIG.context_length, dtype=torch.int64), caches)
    with pytest.raises((AssertionError, IndexError)):
        model.logits(torch.zeros(1, 1, dtype=torch.int64), caches)
