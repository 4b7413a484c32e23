"""Splits text into words and hashes word n-grams, for repetition and near-duplicate detection.

Hashes depend on the text alone: not on the process, the machine or Python's hash seed.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np
from numpy.typing import NDArray

NGRAM_WORDS = 5
MAX_CACHED_WORDS = 1 << 20
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SHIFT = np.uint64(29)

# Scripts written without spaces: Thai, Lao, Burmese, Khmer, kana, and Han with its extensions. Each character counts
# as a word. Longer runs of anything else are cut, so that text without spaces still has n-grams.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
ASCII_WORD = re.compile(r"\w{1,16}")
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]{{1,16}}")


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return (ASCII_WORD if text.isascii() else WORD).findall(text.lower())


class NgramHasher:
    """Hashes every word 5-gram; a shorter text is one n-gram."""

    def __init__(self) -> None:
        self._hashes = _WordHashes()

    def hash_ngrams(self, words: list[str]) -> NDArray[np.uint64]:
        hashes = np.fromiter(map(self._hashes.__getitem__, words), np.uint64, len(words))
        size = min(NGRAM_WORDS, len(words))
        ngrams = np.zeros(len(words) - size + 1 if words else 0, np.uint64)
        for offset in range(size):
            ngrams = ngrams * MULTIPLIER + hashes[offset : offset + len(ngrams)]
            ngrams ^= ngrams >> SHIFT
        return ngrams


class _WordHashes(dict[str, int]):
    """A cache of word hashes, emptied when full."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MAX_CACHED_WORDS:
            self.clear()
        self[word] = value = hash_text(word)
        return value


def hash_text(text: str) -> int:
    """Returns a 64-bit hash of a text."""
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def hash_bytes(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
