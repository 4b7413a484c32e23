"""The interface of tokenizers, and what is derived from it: ids' dtype, decoding, fingerprint."""

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
    """Text to ids and back. Ids run from 0 to vocab_size - 1; every document begins with `end_of_text`."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> TokenArray:
        """Returns the ids of plain text; nothing in it is treated as a special token."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the UTF-8 bytes of ids; they may end inside a character. `end_of_text` decodes to nothing."""

    def spec(self) -> dict[str, Any]:
        """Returns everything needed to restore the tokenizer, as JSON values."""


class TrainableTokenizer(Tokenizer, Protocol):
    """A tokenizer that gptmill can build by name: trained on texts, or restored from its spec."""

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """Returns the tokenizer of a corpus; reads `texts` only if it depends on them."""

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        """Returns the tokenizer whose `spec()` this is."""


class FixedTokenizer:
    """Base of tokenizers that do not depend on the corpus."""

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:  # noqa: ARG003
        return cls()

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:  # noqa: ARG003
        return cls()


def choose_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest unsigned dtype that holds every id, uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def find_document_start(tokenizer: Tokenizer) -> int:
    """Returns the id that begins a document for a model in use: `end_of_text`, unless a published model has its own."""
    start: int = getattr(tokenizer, "begin_of_text", tokenizer.end_of_text)
    return start


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decodes ids to text; an incomplete character at either end becomes U+FFFD."""
    return tokenizer.decode_bytes(ids).decode("utf-8", errors="replace")


def make_fingerprint(tokenizer: Tokenizer) -> str:
    """Hashes everything that determines the ids: equal fingerprints mean equal ids for every text."""
    # Compressed values are left out: their bytes depend on the version of zlib, and their SHA-256 is in the spec too.
    # How a model begins a document decides no ids of a corpus.
    spec = tokenizer.spec().items()
    hashed = {name: value for name, value in spec if not name.endswith("_zlib_base64") and name != "begin_of_text"}
    canonical = json.dumps(hashed, sort_keys=True, ensure_ascii=True).encode()
    return f"{tokenizer.name}:{hashlib.sha256(canonical).hexdigest()[:16]}"


def check_fingerprint(made_with: str, present: str, where: str) -> None:
    """Raises UserError if the fingerprints differ: a model must not be fed another tokenizer's ids."""
    if made_with != present:
        raise UserError(
            f"tokenizer mismatch: {where} was made with {made_with}, but the present tokenizer is {present}; "
            f"use the corpus and the gptmill that it was made with, or prepare the corpus again"
        )
