"""Byte tokenizer: encodes any text, needs no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gptmill.data.tokenizers.protocol import FixedTokenizer, TokenArray


class ByteTokenizer(FixedTokenizer):
    """256 bytes and an end-of-text token."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < self.end_of_text)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size}
