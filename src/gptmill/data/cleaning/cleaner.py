"""Cleans one document at a time: repairs it, applies the filters and computes its deduplication keys."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning.languages import LanguageFilter
from gptmill.data.cleaning.repair import load_ftfy, normalize
from gptmill.data.cleaning.repetition import measure_repetition
from gptmill.data.cleaning.signatures import Keys, load_minhash
from gptmill.data.cleaning.words import NgramHasher, hash_text, split_words

Filter = tuple[str, Callable[[str], bool | str]]  # the option's name, and whether, or why, it drops a document


class Drop(NamedTuple):
    """The filter that drops a document, and what it found, if it tells."""

    option: str
    finding: str = ""


class Cleaner:
    """The steps that the options enable, as pure functions of a document."""

    def __init__(self, options: CleaningOptions) -> None:
        self._options = options
        self._hasher = NgramHasher()
        self._fix_unicode = load_ftfy() if options.fix_unicode else None
        self._make_band_keys = load_minhash() if options.drop_near_duplicates else None
        self._filters = tuple(self._build_filters())

    def repair(self, text: str) -> str:
        """Returns the document with its encoding repaired and its Unicode normalised; may be empty."""
        if self._fix_unicode:
            text = self._fix_unicode(text)
        return normalize(text, self._options.normalize) if self._options.normalize else text

    def find_drop(self, text: str) -> Drop | None:
        """Returns the first filter that drops the document, or None."""
        for name, find in self._filters:
            if found := find(text):
                return Drop(name, found if isinstance(found, str) else "")
        return None

    def make_keys(self, text: str) -> Keys:
        """Returns the hash of the exact text, then the MinHash band keys; nothing if deduplication is off."""
        if not (self._options.drop_duplicates or self._make_band_keys):
            return np.empty(0, np.uint64)
        keys = [hash_text(text)]
        if self._make_band_keys:
            keys += self._make_band_keys(self._hasher.hash_ngrams(split_words(text)))
        return np.array(keys, np.uint64)

    def _build_filters(self) -> Iterator[Filter]:
        """Yields the enabled filters, the cheapest first."""
        options = self._options
        if (min_chars := options.min_chars) is not None:
            yield "min_chars", lambda text: len(text) < min_chars
        if (max_chars := options.max_chars) is not None:
            yield "max_chars", lambda text: len(text) > max_chars
        if (max_symbols := options.max_symbol_ratio) is not None:
            yield "max_symbol_ratio", lambda text: measure_symbol_ratio(text) > max_symbols
        if (max_repetition := options.max_repetition) is not None:
            yield "max_repetition", lambda text: measure_repetition(text, self._hasher) > max_repetition
        if options.languages is not None:
            yield "languages", LanguageFilter(options.languages, options.min_language_score).find_unwanted


def measure_symbol_ratio(text: str) -> float:
    """Returns the fraction of characters that are neither letters, digits nor white space."""
    if not text:
        return 0.0
    return sum(count for character, count in Counter(text).items() if _is_symbol(character)) / len(text)


def _is_symbol(character: str) -> bool:
    # Marks belong to letters: the vowel signs of Hindi and Thai, combining accents.
    is_part_of_word = character.isalnum() or unicodedata.category(character).startswith("M")
    return not is_part_of_word and not character.isspace()
