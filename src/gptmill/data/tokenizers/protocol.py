"""What every tokenizer offers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError

TokenArray = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """Text to ids and back. Ids run from 0 to vocab_size - 1; `end_of_text` opens every document."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> TokenArray:
        """Ids of plain text; nothing in it is taken for a special token."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 bytes of ids; a prefix may end inside a character. `end_of_text` has no bytes."""

    def spec(self) -> dict[str, Any]:
        """All that is needed to make the same tokenizer again, as JSON."""


class FixedTokenizer:
    """For tokenizers that are the same for every corpus."""

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Self:  # noqa: ARG003
        return cls()

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:  # noqa: ARG003
        return cls()


def choose_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids; a character cut at either end shows as U+FFFD."""
    return tokenizer.decode_bytes(ids).decode("utf-8", errors="replace")


def make_fingerprint(tokenizer: Tokenizer) -> str:
    """Names the tokenizer and everything that decides its ids: equal fingerprints, equal tokens."""
    # Compressed parts have a checksum beside them; their own bytes differ from one zlib to another.
    decisive = {name: value for name, value in tokenizer.spec().items() if not name.endswith("_zlib_base64")}
    canonical = json.dumps(decisive, sort_keys=True, ensure_ascii=True).encode()
    return f"{tokenizer.name}:{hashlib.sha256(canonical).hexdigest()[:16]}"


def check_fingerprint(made_with: str, present: str, where: str) -> None:
    """Raises UserError, naming both, where a model would be fed another tokenizer's ids."""
    if made_with != present:
        raise UserError(
            f"tokenizer mismatch: {where} was made with {made_with}, but here is {present}; "
            f"use the corpus and the gptmill that it was made with, or prepare the corpus again"
        )
