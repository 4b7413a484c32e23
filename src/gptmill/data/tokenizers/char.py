"""Character tokenizer: its vocabulary is the set of characters in the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

AFTER_UNICODE = 0x110000  # larger than any code point, so that every search returns an index inside the table


class CharTokenizer:
    """One id per character, in code-point order, followed by the end-of-text token."""

    name = "char"

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 1
        self.end_of_text = len(alphabet)
        self._points = np.array([*map(ord, alphabet), AFTER_UNICODE], dtype=np.uint32)

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """Builds the tokenizer of all characters in `texts`."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls("".join(sorted(characters)))

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        alphabet = spec["alphabet"]
        if not isinstance(alphabet, str) or list(alphabet) != sorted(set(alphabet)):
            raise ValueError("its alphabet is not sorted")
        alphabet.encode()  # raises for lone surrogates
        return cls(alphabet)

    def encode(self, text: str) -> TokenArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = self._points[ids] == points
        if not known.all():
            unknown = "".join(sorted({chr(point) for point in points[~known]}))
            raise UserError(f"the corpus does not contain {unknown!r}; use only characters that it contains")
        return ids.astype(choose_dtype(self.vocab_size))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join(self.alphabet[token] for token in ids if token < self.end_of_text).encode("utf-8")

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "alphabet": self.alphabet}
