"""Encodes a chunk in a worker: reads, cleans and tokenizes its documents. A pure function, in any process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptmill.config.requests import CleaningOptions, ReadingOptions
from gptmill.data.cleaning import Cleaner, Drop
from gptmill.data.pipeline.chunks import Chunk, Item, measure
from gptmill.data.sources import Defect
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype

# The random draw of a document is a hash of its text. Draws below val_fraction * DRAW_RANGE go to validation.
DRAW_RANGE = 2**64
ALWAYS_VAL, ALWAYS_TRAIN = 0, DRAW_RANGE - 1
PREVIEW_CHARS = 80
PIECE_CHARS = 32 * 2**20  # more than any part of an uncompressed file; only decompressed text can exceed it


@dataclass(frozen=True)
class EncodingOptions:
    """Everything that encoding depends on besides the chunk itself."""

    spec: dict[str, Any]
    fingerprint: str
    reading: ReadingOptions
    cleaning: CleaningOptions
    first_val_file: int
    tail_fraction: float | None
    """The fraction at the end of each document that goes to validation; None keeps documents whole."""


class Document(NamedTuple):
    """One document of a chunk: its source file, and its pieces as (random draw, number of tokens)."""

    file_number: int
    pieces: tuple[tuple[int, int], ...]
    keys: NDArray[np.uint64] | None
    preview: str
    size_bytes: int
    drop: Drop | None = None
    """The filter that drops the document, which then has no pieces."""


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of all pieces, concatenated, and the documents that they belong to, with the defects between them."""

    tokens: TokenArray
    documents: list[Document | Defect]
    repaired: int
    is_complete: bool
    """Whether the chunk has no further documents."""


_tokenizers: dict[str, Tokenizer] = {}
_cleaners: dict[CleaningOptions, Cleaner] = {}


def encode_chunk(chunk: Chunk, options: EncodingOptions) -> EncodedChunk:
    """Encodes the chunk, or as much of it as fits in bounded memory. Raises UserError for unreadable text."""
    return next(encode_pieces(chunk, options))


def encode_pieces(chunk: Chunk, options: EncodingOptions, skipped: int = 0) -> Iterator[EncodedChunk]:
    """Encodes the chunk without its first `skipped` documents, in pieces of bounded size."""
    if options.fingerprint not in _tokenizers:
        _tokenizers[options.fingerprint] = restore_tokenizer(options.spec, "this preparation")
    if options.cleaning not in _cleaners:
        _cleaners[options.cleaning] = Cleaner(options.cleaning)
    documents = islice(chunk.read(options.reading), skipped, None)
    is_complete = False
    while not is_complete:
        piece = _encode(documents, options, _tokenizers[options.fingerprint], _cleaners[options.cleaning])
        is_complete = piece.is_complete
        yield piece


def load_worker() -> None:
    """Does nothing: calling it in a worker imports this module and what encoding needs."""


def read_clean(chunks: Iterator[Chunk], reading: ReadingOptions, cleaning: CleaningOptions) -> Iterator[str]:
    """Yields the cleaned texts before deduplication, to train a tokenizer on."""
    cleaner = Cleaner(cleaning)
    for chunk in chunks:
        for _, item in chunk.read(reading):
            text = cleaner.repair(item) if isinstance(item, str) else ""
            if text and cleaner.find_drop(text) is None:
                yield text


def _encode(
    items: Iterator[tuple[int, Item]], options: EncodingOptions, tokenizer: Tokenizer, cleaner: Cleaner
) -> EncodedChunk:
    dtype = choose_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.end_of_text], dtype=dtype)
    arrays: list[TokenArray] = [end_of_text[:0]]
    documents: list[Document | Defect] = []
    repaired, chars = 0, 0
    for file_number, item in items:
        chars += measure(item)
        if isinstance(item, Defect):
            documents.append(item)
        else:
            text = cleaner.repair(item)
            repaired += text != item
            document, ids = _encode_document(text, file_number, options, tokenizer, cleaner)
            documents.append(document)
            for piece_ids in ids:
                arrays += [end_of_text, piece_ids]
        if chars >= PIECE_CHARS:
            return EncodedChunk(np.concatenate(arrays, dtype=dtype), documents, repaired, is_complete=False)
    return EncodedChunk(np.concatenate(arrays, dtype=dtype), documents, repaired, is_complete=True)


def _encode_document(
    text: str, file_number: int, options: EncodingOptions, tokenizer: Tokenizer, cleaner: Cleaner
) -> tuple[Document, list[TokenArray]]:
    """Returns a cleaned document, and the tokens of each of its pieces."""
    content = text.encode("utf-8")
    drop = cleaner.find_drop(text) if text else Drop("fix_unicode")
    pieces, ids = [], []
    for draw, part in [] if drop else _split(text, content, file_number, options):
        ids.append(tokenizer.encode(part))
        pieces.append((draw, len(ids[-1]) + 1))
    keys = cleaner.make_keys(text)
    preview = text[:PREVIEW_CHARS] if drop or len(keys) else ""  # needed only if it may be dropped
    return Document(file_number, tuple(pieces), keys if len(keys) else None, preview, len(content), drop), ids


def _split(text: str, content: bytes, file_number: int, options: EncodingOptions) -> list[tuple[int, str]]:
    """Returns the (random draw, text) pieces of a document: a pure function of it, independent of the order."""
    if file_number >= options.first_val_file:
        return [(ALWAYS_VAL, text)]
    if options.tail_fraction is None:
        return [(int.from_bytes(hashlib.sha256(content).digest()[:8], "big"), text)]
    cut = len(text) - round(len(text) * options.tail_fraction)
    return [(draw, part) for draw, part in ((ALWAYS_TRAIN, text[:cut]), (ALWAYS_VAL, text[cut:])) if part]
