"""Diversity of what a model writes: how many of its n-grams differ, and how much its texts repeat themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev

from gptmill.evals.likelihood import Report
from gptmill.evals.metrics import Measured
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.loading import LoadedModel
from gptmill.inference.token_sampling import SamplingConfig

TEXT_TOKENS = 256
BATCH_SIZE = 32
REPEATED = 4  # tokens of an n-gram that a text should not write twice
NGram = tuple[int, ...]


@dataclass(frozen=True)
class DiversityScores:
    """How diverse a model's texts are."""

    name: str
    num_tokens: int
    metrics: dict[str, Measured]
    seconds: float


def score_diversity(loaded: LoadedModel, count: int, report: Report) -> DiversityScores:
    """Samples texts from the beginning of a document, with the model's own probabilities, and measures them."""
    start = time.monotonic()
    texts: list[list[int]] = []
    for first in range(0, count, BATCH_SIZE):
        texts += sample_texts(loaded, range(first, min(first + BATCH_SIZE, count)))
        report(len(texts), count)
    return DiversityScores("samples", sum(map(len, texts)), measure_diversity(texts), time.monotonic() - start)


def sample_texts(loaded: LoadedModel, seeds: Sequence[int]) -> list[list[int]]:
    """Texts up to their end, or as long as the context and TEXT_TOKENS allow."""
    end, model = loaded.tokenizer.end_of_text, loaded.model
    generator = BatchGenerator(model, SamplingConfig(temperature=1.0), loaded.tokenizer.vocab_size)
    length = min(TEXT_TOKENS, model.config.context_length - 1) or 1
    steps = [step.tokens for step in generator.generate([[end]] * len(seeds), length, seeds)]
    return [list(takewhile(lambda token: token != end, tokens)) for tokens in zip(*steps, strict=True)]


def measure_diversity(texts: Sequence[Sequence[int]]) -> dict[str, Measured]:
    """distinct_n: different n-grams of all texts, as a share of all of theirs (Li 2016); repetition: share of each
    text's 4-grams that it had before. Values of equally many texts of one length compare."""
    metrics = {}
    for n in (1, 2, 3):
        ngrams = [ngram for text in texts for ngram in list_ngrams(text, n)]
        metrics[f"distinct_{n}"] = Measured(len(set(ngrams)) / len(ngrams) if ngrams else 0.0, None)
    shares = [find_repetition(list(list_ngrams(text, REPEATED))) for text in texts]
    stderr = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else None
    return {**metrics, "repetition": Measured(fmean(shares), stderr)}


def list_ngrams(text: Sequence[int], n: int) -> Iterator[NGram]:
    return zip(*(text[offset:] for offset in range(n)), strict=False)


def find_repetition(ngrams: Sequence[NGram]) -> float:
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
