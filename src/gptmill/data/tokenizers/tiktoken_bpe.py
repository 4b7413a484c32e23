"""Byte-pair encoding by a rank table, through tiktoken. Knows no files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import tiktoken

from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

LONG_WHITE_SPACE = re.compile(r"\s{100000}")


class TiktokenBpe:
    """Encodes by a pre-tokenizer `pattern` and `ranks`; no text is ever encoded to `special_tokens`."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> None:
        """Raises ValueError if tiktoken cannot parse the pattern."""
        self.pattern = pattern
        self.ranks = ranks
        self.special_tokens = special_tokens
        self.vocab_size = max([*ranks.values(), *special_tokens.values()]) + 1
        self._dtype = choose_dtype(self.vocab_size)
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {rank: token.encode() for token, rank in special_tokens.items()}
        self._encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> TokenArray:
        try:
            return self._encoding.encode_to_numpy(text).astype(self._dtype)
        except ValueError:  # tiktoken fails on about a million white-space characters in a row
            pieces = split_long_whitespace(text)
            if len(pieces) == 1:
                raise
            return np.concatenate([self.encode(piece) for piece in pieces])

    def decode_bytes(self, ids: Sequence[int], end_of_text: int) -> bytes:
        """Ids without a token, which some published vocabularies have, decode to nothing."""
        return b"".join(self._bytes.get(token, b"") for token in ids if token != end_of_text)


def split_long_whitespace(text: str) -> list[str]:
    """Splits runs of white space that are too long for tiktoken's regular expressions."""
    cuts = [0, *(match.end() for match in LONG_WHITE_SPACE.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]
