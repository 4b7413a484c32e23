"""How diverse texts are: shares of n-grams, and what repeats within a text."""

from __future__ import annotations

import pytest

from gptmill.config.model import ModelConfig
from gptmill.data.tokenizers import TOKENIZERS
from gptmill.evals.diversity import measure_diversity, score_diversity
from gptmill.inference.loading import LoadedModel
from gptmill.models.gpt import build_gpt, pad_vocab


def read(texts: list[list[int]]) -> dict[str, float]:
    return {name: round(measured.value, 4) for name, measured in measure_diversity(texts).items()}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], [1, 1, 1, 0]),  # nothing twice
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], [0.5, 0.5, 0.5, 0]),  # twice the same, but none repeats itself
        ([[7] * 13], [1 / 13, 1 / 12, 1 / 11, 0.9]),
        ([[], [1]], [1, 0, 0, 0]),  # too short to have n-grams
    ],
    ids=["different", "copies", "stuck", "short"],
)
def test_shares_of_ngrams_and_repetition(texts: list[list[int]], expected: list[float]) -> None:
    assert [*read(texts).values()] == [round(value, 4) for value in expected]


def test_a_model_s_texts_are_measured_the_same_every_time_and_in_batches() -> None:
    tokenizer = TOKENIZERS["byte"]()
    config = ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=8)
    loaded = LoadedModel(build_gpt(config, pad_vocab(tokenizer.vocab_size), seed=0), tokenizer, 3)
    told: list[tuple[int, int]] = []
    scores = [score_diversity(loaded, 40, lambda *amounts: told.append(amounts)) for _ in range(2)]
    assert scores[0].metrics == scores[1].metrics
    assert told == [(32, 40), (40, 40)] * 2
    assert 0 < scores[0].num_tokens <= 40 * 7
    assert scores[0].metrics["distinct_3"].value > 0.9  # a fresh model writes noise
