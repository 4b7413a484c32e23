"""GPT-2's ids by gigatoken, many times as fast as by tiktoken, for the texts that both are known to cut alike.

GPT-2's pattern cuts a text by what its characters are: letters, numbers, white space, or anything else. The libraries
know different versions of Unicode, so both are asked about every common character, and a text with any on which they
differ, or any other, goes to tiktoken. Without gigatoken, or with one that errs when it is asked, every text does.
"""

from __future__ import annotations

import base64
import random
import re
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gptmill.data.tokenizers.byte_pairs import BytePairs
from gptmill.data.tokenizers.protocol import TokenArray

Result = TypeVar("Result")

# Starting takes as long as tiktoken takes for about this much text.
WORTH_STARTING_CHARACTERS = 3_000_000
# gigatoken 0.10 remembers every word that it ever saw. A new one is made after so many tokens: by then an old one
# holds about 150 MB after prose, and 500 MB after noise.
RENEW_AFTER_TOKENS = 1 << 25
# The characters that the libraries are compared on: the first plane, mathematical letters, pictures.
COMMON = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1D400, 0x1D800), *range(0x1F000, 0x1FB00)]
# Too much white space for tiktoken, which BytePairs then cuts; every thousandth character shows it.
STRIDE = 1000
MUCH_WHITE_SPACE = re.compile(r"\s{100}")


class FastBackend:
    """A gigatoken that was compared with tiktoken; `strange` says of every code point whether a text may hold it."""

    def __init__(self, library: Any, table: bytes, strange: NDArray[np.bool_], dtype: np.dtype[Any]) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._library = library
        self._table = table
        self._strange = strange
        self._first_strange = int(strange.argmax())
        self._dtype = dtype
        self._tokens_left = RENEW_AFTER_TOKENS

    def encode(self, text: str) -> TokenArray | None:
        """The ids, or None where tiktoken has to find them."""
        if not self._is_plain(text) or MUCH_WHITE_SPACE.search(text[::STRIDE]):
            return None
        ids = _attempt(lambda: self._encode(text))
        if ids is None:
            self._tokens_left = 0
        return ids

    def _is_plain(self, text: str) -> bool:
        if text.isascii():
            return True
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        return not self._strange[points[points >= self._first_strange]].any()

    def _encode(self, text: str) -> TokenArray:
        if self._tokens_left <= 0:
            self._library = _open_library(self._table)
            self._tokens_left = RENEW_AFTER_TOKENS
        ids: TokenArray = self._library.encode(text).astype(self._dtype)
        self._tokens_left -= len(ids)
        return ids


def build_fast_backend(pattern: str, ranks: dict[bytes, int], pairs: BytePairs) -> FastBackend | None:
    """An accelerator of `pairs`, which are made of `pattern` and `ranks`; None where there is none to trust."""
    return _attempt(lambda: _build_checked(pattern, ranks, pairs))


def _build_checked(pattern: str, ranks: dict[bytes, int], pairs: BytePairs) -> FastBackend | None:
    table = _make_table(ranks)
    library = _open_library(table)
    strange = _find_strange(pattern)
    words = _make_words(ranks)
    expected = pairs.encode(words)
    if strange[:0x80].any() or not np.array_equal(library.encode(words), expected):
        return None
    return FastBackend(library, table, strange, expected.dtype)


def _attempt(call: Callable[[], Result]) -> Result | None:
    """What the call returns; None where it fails, for tiktoken can do all that gigatoken can."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is no Exception
        return None


def _open_library(table: bytes) -> Any:
    import gigatoken

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.tiktoken"
        path.write_bytes(table)
        return gigatoken.Tokenizer.from_tiktoken(path, pretokenizer="gpt2")


def _make_table(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def _make_words(ranks: dict[bytes, int]) -> str:
    """Every token that is text, in an order drawn by lot, so that tokens meet as they seldom do."""
    tokens = [token.decode("utf-8", errors="ignore") for token in ranks]
    random.Random(0).shuffle(tokens)
    return "".join(tokens)


def _find_strange(pattern: str) -> NDArray[np.bool_]:
    """By code point: whether the libraries take it for different things, or were not asked.

    Neither shows where it cuts a text. So both get a table in which a character joins a letter before it, a number
    after it or a sign before it: it is a letter, a number, neither, or white space if it joins nothing.
    """
    joints = [b"a%c", b"%c1", b"!%c"]
    tokens = [bytes([byte]) for byte in range(256)] + [joint % byte for joint in joints for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    units = [f"a{chr(point)}1!{chr(point)}" for point in COMMON]
    text = "".join(units)
    lengths = np.array([len(token) for token in ranks])
    ours = np.cumsum(lengths[BytePairs(pattern, ranks, {}).encode(text)])
    theirs = np.cumsum(lengths[_open_library(_make_table(ranks)).encode(text)])
    starts = np.cumsum([0, *(len(unit.encode()) for unit in units)])
    differing = np.searchsorted(starts, np.setxor1d(ours, theirs, assume_unique=True), side="right") - 1
    strange = np.ones(0x110000, dtype=np.bool_)
    strange[COMMON] = False
    strange[np.array(COMMON)[differing]] = True
    return strange
