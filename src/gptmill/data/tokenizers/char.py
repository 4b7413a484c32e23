"""Characters as tokens: the alphabet is whatever the corpus uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

AFTER_UNICODE = 0x110000  # larger than any character, so that every search ends inside the table


class CharTokenizer:
    """One id per character, in code-point order, and an end-of-text mark after them."""

    name = "char"

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 1
        self.end_of_text = len(alphabet)
        self._points = np.array([*map(ord, alphabet), AFTER_UNICODE], dtype=np.uint32)

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Self:
        """The tokenizer of all characters in `texts`."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls("".join(sorted(characters)))

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        alphabet = spec["alphabet"]
        if not isinstance(alphabet, str) or list(alphabet) != sorted(set(alphabet)):
            raise ValueError("its alphabet is not in order")
        alphabet.encode()  # half a surrogate pair is no character
        return cls(alphabet)

    def encode(self, text: str) -> TokenArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = self._points[ids] == points
        if not known.all():
            strange = "".join(sorted({chr(point) for point in points[~known]}))
            raise UserError(f"the corpus' alphabet has no {strange!r}; use only characters that the corpus contains")
        return ids.astype(choose_dtype(self.vocab_size))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join(self.alphabet[token] for token in ids if token < self.end_of_text).encode("utf-8")

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "alphabet": self.alphabet}
