"""How much of a text repeats what it said before.

After Gopher's filters (Rae et al. 2021, appendix A1.1): the share of characters in lines that stood there before, and
in phrases of five words that did; the larger of the two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gptmill.data.cleaning.words import PHRASE_WORDS, PhraseHasher, split_words


def measure_repetition(text: str, hasher: PhraseHasher) -> float:
    """From 0, nothing is said twice, to nearly 1."""
    return max(_measure_lines(text), _measure_phrases(text, hasher))


def _measure_lines(text: str) -> float:
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if not lines:
        return 0.0
    total = sum(map(len, lines))
    return (total - sum(map(len, set(lines)))) / total


def _measure_phrases(text: str, hasher: PhraseHasher) -> float:
    words = split_words(text)
    if len(words) <= PHRASE_WORDS:
        return 0.0
    phrases = hasher.hash_phrases(words)
    in_repeat = np.zeros(len(words), bool)
    repeats = _find_repeats(phrases)
    for offset in range(PHRASE_WORDS):
        in_repeat[repeats + offset] = True
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return float(lengths[in_repeat].sum() / lengths.sum())


def _find_repeats(phrases: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Where a phrase stands that stood before."""
    ordered = np.sort(phrases)
    several = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(several):
        return np.empty(0, np.intp)
    # Few phrases of an ordinary text occur twice: only those are worth the slow search for which came first.
    nearest = np.minimum(np.searchsorted(several, phrases), len(several) - 1)
    places = np.flatnonzero(several[nearest] == phrases)
    _, first = np.unique(phrases[places], return_index=True)
    return np.delete(places, first)
