"""How repetitive a text is.

After Gopher's filters (Rae et al. 2021, appendix A1.1): the fraction of characters in duplicate lines or in duplicate
word 5-grams, whichever is larger.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gptmill.data.cleaning.words import NGRAM_WORDS, NgramHasher, split_words


def measure_repetition(text: str, hasher: NgramHasher) -> float:
    """Returns a fraction from 0, nothing repeats, to nearly 1."""
    return max(_measure_lines(text), _measure_ngrams(text, hasher))


def _measure_lines(text: str) -> float:
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if not lines:
        return 0.0
    total = sum(map(len, lines))
    return (total - sum(map(len, set(lines)))) / total


def _measure_ngrams(text: str, hasher: NgramHasher) -> float:
    words = split_words(text)
    if len(words) <= NGRAM_WORDS:
        return 0.0
    in_repeat = np.zeros(len(words), bool)
    repeats = _find_repeats(hasher.hash_ngrams(words))
    for offset in range(NGRAM_WORDS):
        in_repeat[repeats + offset] = True
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return float(lengths[in_repeat].sum() / lengths.sum())


def _find_repeats(ngrams: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Returns the indices of n-grams that occurred before."""
    ordered = np.sort(ngrams)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return np.empty(0, np.intp)
    # Few n-grams of an ordinary text repeat, so the slow search for first occurrences is limited to those.
    nearest = np.minimum(np.searchsorted(repeated, ngrams), len(repeated) - 1)
    indices = np.flatnonzero(repeated[nearest] == ngrams)
    _, first = np.unique(ngrams[indices], return_index=True)
    return np.delete(indices, first)
