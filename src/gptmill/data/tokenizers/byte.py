"""Bytes as tokens: works for any text, needs no vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from gptmill.data.tokenizers.protocol import TokenArray


class ByteTokenizer:
    """256 bytes and an end-of-text mark."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Self:  # noqa: ARG003
        return cls()

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:  # noqa: ARG003
        return cls()

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < self.end_of_text)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size}
