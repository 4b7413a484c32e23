"""Documents of bounded length: what is longer is cut where no token is torn."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_DOCUMENT_CHARS = 8 * 2**20
SEARCHED_CHARS = 2**16
# Byte-pair tokens of every common kind begin at the white space after a letter, and none spans it.
WORD_END = re.compile(r"[^\W\d_](?=\s)")


class DocumentCutter:
    """Takes a document piece by piece and gives documents of bounded length; the pieces' borders do not matter."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0

    def add(self, piece: str) -> Iterator[str]:
        """More of the document; yields what is complete by it."""
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

    def finish(self) -> Iterator[str]:
        """The end of the document; the next piece begins another one."""
        text = "".join(self._pieces)
        self._pieces, self._chars = [], 0
        if is_text(text):
            yield text


def cut_documents(documents: Iterator[str]) -> Iterator[str]:
    """The same text without documents that are too long or only white space."""
    cutter = DocumentCutter()
    for document in documents:
        if len(document) > MAX_DOCUMENT_CHARS:
            yield from cutter.add(document)
            yield from cutter.finish()
        elif is_text(document):
            yield document


def is_text(document: str) -> bool:
    return bool(document) and not document.isspace()


def _find_cut(text: str, limit: int, start: int) -> int:
    """The last place up to `limit` between a letter and white space; `limit` itself where there is none near."""
    cut = limit
    # One character past the limit is looked at, so that a word may end exactly there.
    for match in WORD_END.finditer(text, max(start, limit - SEARCHED_CHARS), limit + 1):
        cut = match.end()
    return cut
