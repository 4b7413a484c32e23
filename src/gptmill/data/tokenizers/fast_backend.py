"""Fast backend of the GPT-2 tokenizer: gigatoken, for texts that it is verified to pre-tokenize as tiktoken does.

GPT-2's pattern splits text by character class: letters, numbers, white space, anything else. The two libraries
implement different versions of Unicode, so they are compared on every common character; a text with a character on
which they differ, or that was not compared, is encoded by tiktoken. So is every text if gigatoken is missing or fails
the comparison.
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

from gptmill.data.tokenizers.protocol import TokenArray
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe

Result = TypeVar("Result")

# Starting the backend takes as long as tiktoken takes for about this much text.
START_AFTER_CHARACTERS = 3_000_000
# gigatoken 0.10 caches every word that it encodes, without limit. The instance is replaced after this many tokens, when
# its cache holds about 150 MB for prose and 500 MB for random text.
RENEW_AFTER_TOKENS = 1 << 25
# The code points on which the libraries are compared: the basic plane, mathematical letters, pictographs.
COMMON = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1D400, 0x1D800), *range(0x1F000, 0x1FB00)]
# Detects white space too long for tiktoken, which TiktokenBpe then splits, by looking at every thousandth character.
STRIDE = 1000
MUCH_WHITE_SPACE = re.compile(r"\s{100}")


class FastBackend:
    """A gigatoken instance that was verified against tiktoken; `unsafe` marks the code points that it must not see."""

    def __init__(self, gigatoken: Any, table: bytes, unsafe: NDArray[np.bool_], dtype: np.dtype[Any]) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._gigatoken = gigatoken
        self._table = table
        self._unsafe = unsafe
        self._first_unsafe = int(unsafe.argmax())
        self._dtype = dtype
        self._tokens_left = RENEW_AFTER_TOKENS

    def encode(self, text: str) -> TokenArray | None:
        """Returns the ids, or None if tiktoken must encode this text."""
        if not self._is_safe(text) or MUCH_WHITE_SPACE.search(text[::STRIDE]):
            return None
        ids = _attempt(lambda: self._encode(text))
        if ids is None:
            self._tokens_left = 0
        return ids

    def _is_safe(self, text: str) -> bool:
        if text.isascii():
            return True
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        return not self._unsafe[points[points >= self._first_unsafe]].any()

    def _encode(self, text: str) -> TokenArray:
        if self._tokens_left <= 0:
            self._gigatoken = _load_gigatoken(self._table)
            self._tokens_left = RENEW_AFTER_TOKENS
        ids: TokenArray = self._gigatoken.encode(text).astype(self._dtype)
        self._tokens_left -= len(ids)
        return ids


def build_fast_backend(pattern: str, ranks: dict[bytes, int], bpe: TiktokenBpe) -> FastBackend | None:
    """Builds the fast backend of `bpe`, which has this `pattern` and `ranks`; None if gigatoken fails or differs."""
    return _attempt(lambda: _build_verified(pattern, ranks, bpe))


def _build_verified(pattern: str, ranks: dict[bytes, int], bpe: TiktokenBpe) -> FastBackend | None:
    table = _make_table(ranks)
    gigatoken = _load_gigatoken(table)
    unsafe = _find_unsafe_code_points(pattern)
    words = _make_words(ranks)
    expected = bpe.encode(words)
    if unsafe[:0x80].any() or not np.array_equal(gigatoken.encode(words), expected):
        return None
    return FastBackend(gigatoken, table, unsafe, expected.dtype)


def _attempt(call: Callable[[], Result]) -> Result | None:
    """Returns the result of the call, or None if it fails: tiktoken is always there to fall back to."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a Rust panic is not an Exception
        return None


def _load_gigatoken(table: bytes) -> Any:
    import gigatoken

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.tiktoken"
        path.write_bytes(table)
        return gigatoken.Tokenizer.from_tiktoken(path, pretokenizer="gpt2")


def _make_table(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def _make_words(ranks: dict[bytes, int]) -> str:
    """Concatenates every token that is valid UTF-8 in random order, to test unusual neighbours."""
    tokens = [token.decode("utf-8", errors="ignore") for token in ranks]
    random.Random(0).shuffle(tokens)
    return "".join(tokens)


def _find_unsafe_code_points(pattern: str) -> NDArray[np.bool_]:
    """Returns, by code point, whether the libraries classify it differently or were not compared on it.

    Neither library exposes where it splits a text. So both get a rank table in which a character merges with a letter
    before it, a digit after it or a symbol before it. That shows its class; white space merges with none of them.
    """
    templates = [b"a%c", b"%c1", b"!%c"]
    tokens = [bytes([byte]) for byte in range(256)] + [template % byte for template in templates for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    units = [f"a{chr(point)}1!{chr(point)}" for point in COMMON]
    text = "".join(units)
    lengths = np.array([len(token) for token in ranks])
    ours = np.cumsum(lengths[TiktokenBpe(pattern, ranks, {}).encode(text)])
    theirs = np.cumsum(lengths[_load_gigatoken(_make_table(ranks)).encode(text)])
    starts = np.cumsum([0, *(len(unit.encode()) for unit in units)])
    differing = np.searchsorted(starts, np.setxor1d(ours, theirs, assume_unique=True), side="right") - 1
    unsafe = np.ones(0x110000, dtype=np.bool_)
    unsafe[COMMON] = False
    unsafe[np.array(COMMON)[differing]] = True
    return unsafe
