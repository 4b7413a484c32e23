"""OpenAI's later encodings. Their rank files are too large to ship, so they are cached and downloaded on first use."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from tiktoken.load import read_file_cached

from gptmill.config.errors import UserError
from gptmill.data.files import find_cache_dir, write_durably
from gptmill.data.tokenizers.gpt2_bpe import END_OF_TEXT, WORD_PATTERN
from gptmill.data.tokenizers.protocol import TokenArray
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe

URL = "https://openaipublic.blob.core.windows.net/encodings"
CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)


@dataclass(frozen=True)
class Encoding:
    """The pattern and special tokens that OpenAI published with a rank file, and its checksum."""

    pattern: str
    special_tokens: dict[str, int]
    sha256: str


ENCODINGS = {
    "p50k_base": Encoding(
        WORD_PATTERN,
        {END_OF_TEXT: 50256},
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    ),
    "cl100k_base": Encoding(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
        r"|\s*[\r\n]|\s+(?!\S)|\s",
        {
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Encoding(
        CASED_WORD % ("*", "+")
        + "|"
        + CASED_WORD % ("+", "*")
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
}


class OpenAiTokenizer:
    """One of `ENCODINGS`."""

    def __init__(self, name: str) -> None:
        encoding = ENCODINGS[name]
        lines = _read_ranks(name).removesuffix(b"\n").split(b"\n")
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
        self.bpe = TiktokenBpe(encoding.pattern, ranks, encoding.special_tokens)
        self.name = name
        self.vocab_size = self.bpe.vocab_size
        self.end_of_text = encoding.special_tokens[END_OF_TEXT]

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        return cls(spec["name"])

    def encode(self, text: str) -> TokenArray:
        return self.bpe.encode(text)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.bpe.decode_bytes(ids, self.end_of_text)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "ranks_sha256": ENCODINGS[self.name].sha256}


def _read_ranks(name: str) -> bytes:
    """Reads the rank file from gptmill's cache, else through tiktoken, which has its own cache and downloads."""
    cached = find_cache_dir() / "tokenizers" / f"{name}.tiktoken"
    url, sha256 = f"{URL}/{name}.tiktoken", ENCODINGS[name].sha256
    if cached.is_file():
        content = cached.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(
                f"{cached} is not the file that OpenAI published (SHA-256 {sha256}); delete it and try again"
            )
        return content
    try:
        content = read_file_cached(url, sha256)
    except (OSError, ValueError) as error:  # no network; a wrong checksum
        reason = "the download has the wrong checksum" if isinstance(error, ValueError) else "the download failed"
        raise UserError(
            f"the rank file of the tokenizer {name} is not cached, and {reason}; "
            f"download {url} (SHA-256 {sha256}) on another machine and copy it to {cached}"
        ) from None
    with suppress(OSError):  # tiktoken's own cache is in a temporary folder, which may be emptied
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_durably(cached, content.decode("ascii"))
    return content
