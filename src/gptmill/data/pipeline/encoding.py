"""What a worker does with a chunk: read, clean, encode. A pure function, wherever it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptmill.config.requests import CleaningOptions, ReadingOptions
from gptmill.data.cleaning import Cleaner
from gptmill.data.pipeline.chunks import Chunk
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

# A piece is drawn into validation if its number is below val_fraction of this.
DRAWS = 2**64
ALWAYS_VAL, ALWAYS_TRAIN = 0, DRAWS - 1
OPENING_CHARS = 80
PIECE_CHARS = 32 * 2**20  # more than any part of a plain file holds; what is packed may hold anything


@dataclass(frozen=True)
class Job:
    """All that encoding depends on beside the chunk itself."""

    spec: dict[str, Any]
    fingerprint: str
    reading: ReadingOptions
    cleaning: CleaningOptions
    first_val_file: int
    tail_fraction: float | None
    """The share at the end of each document that goes to validation; None keeps documents whole."""


class Document(NamedTuple):
    """One document of a chunk: where it came from, and its pieces as (draw, number of tokens)."""

    file_number: int
    pieces: tuple[tuple[int, int], ...]
    keys: NDArray[np.uint64] | None
    opening: str
    size_bytes: int
    fault: str | None = None
    """The filter that drops it; it has no pieces then."""


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of all pieces one after the other, and what they belong to."""

    tokens: TokenArray
    documents: list[Document]
    repaired: int
    is_whole: bool
    """Whether the chunk has no more documents."""


_tokenizers: dict[str, Tokenizer] = {}
_cleaners: dict[CleaningOptions, Cleaner] = {}


def encode_chunk(chunk: Chunk, job: Job) -> EncodedChunk:
    """The chunk, or as much of it as may be held in memory. Raises UserError for a text that cannot be read."""
    return next(encode_pieces(chunk, job))


def encode_pieces(chunk: Chunk, job: Job, skipped: int = 0) -> Iterator[EncodedChunk]:
    """The chunk after its first documents, in pieces of bounded size."""
    if job.fingerprint not in _tokenizers:
        _tokenizers[job.fingerprint] = restore_tokenizer(job.spec, "this preparation")
    if job.cleaning not in _cleaners:
        _cleaners[job.cleaning] = Cleaner(job.cleaning)
    documents = islice(chunk.read(job.reading), skipped, None)
    is_whole = False
    while not is_whole:
        piece = _encode(documents, job, _tokenizers[job.fingerprint], _cleaners[job.cleaning])
        is_whole = piece.is_whole
        yield piece


def load_worker() -> None:
    """Does nothing: by the time that a process can call it, it has loaded what encoding needs."""


def read_clean(chunks: Iterator[Chunk], reading: ReadingOptions, cleaning: CleaningOptions) -> Iterator[str]:
    """The texts that will be kept, before duplicates are looked for: what a tokenizer learns from."""
    cleaner = Cleaner(cleaning)
    for chunk in chunks:
        for _, original in chunk.read(reading):
            text = cleaner.repair(original)
            if text and cleaner.find_drop_reason(text) is None:
                yield text


def _encode(texts: Iterator[tuple[int, str]], job: Job, tokenizer: Tokenizer, cleaner: Cleaner) -> EncodedChunk:
    dtype = choose_dtype(tokenizer.vocab_size)
    opening = np.array([tokenizer.end_of_text], dtype=dtype)
    arrays: list[TokenArray] = [opening[:0]]
    documents, repaired, chars = [], 0, 0
    for file_number, original in texts:
        chars += len(original)
        text = cleaner.repair(original)
        repaired += text != original
        content = text.encode("utf-8")
        fault = cleaner.find_drop_reason(text) if text else "fix_unicode"
        pieces = []
        for draw, part in [] if fault else _split(text, content, file_number, job):
            ids = tokenizer.encode(part)
            arrays += [opening, ids]
            pieces.append((draw, len(ids) + 1))
        keys = cleaner.make_keys(text)
        shown = text[:OPENING_CHARS] if fault or len(keys) else ""  # only of one that may be dropped
        documents.append(Document(file_number, tuple(pieces), keys if len(keys) else None, shown, len(content), fault))
        if chars >= PIECE_CHARS:
            return EncodedChunk(np.concatenate(arrays, dtype=dtype), documents, repaired, is_whole=False)
    return EncodedChunk(np.concatenate(arrays, dtype=dtype), documents, repaired, is_whole=True)


def _split(text: str, content: bytes, file_number: int, job: Job) -> list[tuple[int, str]]:
    """Which text goes where: a pure function of the document, so that the split never depends on the order."""
    if file_number >= job.first_val_file:
        return [(ALWAYS_VAL, text)]
    if job.tail_fraction is None:
        return [(int.from_bytes(hashlib.sha256(content).digest()[:8], "big"), text)]
    cut = len(text) - round(len(text) * job.tail_fraction)
    return [(draw, part) for draw, part in ((ALWAYS_TRAIN, text[:cut]), (ALWAYS_VAL, text[cut:])) if part]
