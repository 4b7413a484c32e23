"""Byte-pair encoding by a table of ranks, through tiktoken. Knows no files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import tiktoken

from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

LONG_WHITE_SPACE = re.compile(r"\s{100000}")


class BytePairs:
    """Text to ids and back by `ranks`; `special_tokens` are ids that no text is encoded to."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> None:
        """Raises ValueError where tiktoken cannot read the pattern."""
        self.vocab_size = max([*ranks.values(), *special_tokens.values()]) + 1
        self._dtype = choose_dtype(self.vocab_size)
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {rank: mark.encode() for mark, rank in special_tokens.items()}
        self._encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> TokenArray:
        try:
            return self._encoding.encode_to_numpy(text).astype(self._dtype)
        except ValueError:  # tiktoken gives up on about a million white-space characters in a row
            pieces = cut_white_space(text)
            if len(pieces) == 1:
                raise
            return np.concatenate([self.encode(piece) for piece in pieces])

    def decode_bytes(self, ids: Sequence[int], end_of_text: int) -> bytes:
        """An id that stands for nothing, as some in a published vocabulary do, has no bytes."""
        return b"".join(self._bytes.get(token, b"") for token in ids if token != end_of_text)


def cut_white_space(text: str) -> list[str]:
    """The text in pieces that have no white space too long for a regular expression."""
    cuts = [0, *(match.end() for match in LONG_WHITE_SPACE.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]
