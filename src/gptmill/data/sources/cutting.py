"""Bounds the length of documents. Longer ones are cut at word boundaries, where no BPE token is split."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gptmill.data.sources.failures import ReadingError, Record

MAX_DOCUMENT_CHARS = 8 * 2**20
SEARCHED_CHARS = 2**16
# Every common BPE pre-tokenizer splits between a letter and the white space after it, so no token spans that boundary.
WORD_END = re.compile(r"[^\W\d_](?=\s)")


class DocumentCutter:
    """Receives a document in pieces and yields documents of bounded length, independent of the piece boundaries."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0
        self._is_cut = False

    def add(self, piece: str) -> Iterator[str]:
        """Appends a piece of the document; yields the documents that are complete."""
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars <= MAX_DOCUMENT_CHARS:
            return
        text = "".join(self._pieces)
        start = 0
        while len(text) - start > MAX_DOCUMENT_CHARS:
            stop = _find_cut(text, start + MAX_DOCUMENT_CHARS, start)
            if is_text(document := text[start:stop]):
                yield document
            start = stop
        self._pieces = [text[start:]]
        self._chars = len(text) - start
        self._is_cut = True

    def finish(self) -> Iterator[str]:
        """Ends the document; yields the rest of it. A document that is white space is yielded, but no such rest."""
        text = "".join(self._pieces)
        if is_text(text) or (text and not self._is_cut):
            yield text
        self._pieces, self._chars, self._is_cut = [], 0, False


def cut_documents(records: Iterator[Record]) -> Iterator[Record]:
    """Cuts documents that are too long."""
    cutter = DocumentCutter()
    for record in records:
        if isinstance(record, ReadingError) or len(record) <= MAX_DOCUMENT_CHARS:
            yield record
        else:
            yield from cutter.add(record)
            yield from cutter.finish()


def is_text(document: str) -> bool:
    return bool(document) and not document.isspace()


def _find_cut(text: str, limit: int, start: int) -> int:
    """Returns the last word boundary up to `limit`, or `limit` itself if there is none nearby."""
    cut = limit
    # The search includes one character past the limit, so that a word may end exactly there.
    for match in WORD_END.finditer(text, max(start, limit - SEARCHED_CHARS), limit + 1):
        cut = match.end()
    return cut
