"""A part of a corpus that stands for the whole: pieces from its beginning to its end."""

from __future__ import annotations

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Source, read_documents

# Corpora are sorted by book, file or date, so that the first part is unlike the rest. Of larger ones than this, what
# comes later is not looked at: reading takes its time from the budget.
READ_CHARS = 64_000_000
MAX_PIECES, MIN_PIECE_CHARS = 64, 4_096
MAX_LINE = 1_000
FEW_DOCUMENTS = 16
SEPARATOR = "\n<|endoftext|>\n"


def read_excerpt(source: Source, max_bytes: int) -> tuple[str, bool]:
    """About so many bytes in pieces with a separator between them; and whether these are all of the corpus."""
    text, is_whole = _read_beginning(source, max(READ_CHARS, max_bytes))
    size = len(text.encode())
    return (text, is_whole) if size <= max_bytes else (spread_pieces(text, max_bytes / size), False)


def spread_pieces(text: str, share: float) -> str:
    """A share of the text in pieces of equal length, which begin with a line and lie at equal distances."""
    num_pieces = max(1, min(MAX_PIECES, int(share * len(text)) // MIN_PIECE_CHARS))
    starts = [_find_line(text, number * len(text) // num_pieces) for number in range(num_pieces)]
    length = int(share * len(text)) // num_pieces
    return SEPARATOR.join(text[start : start + length] for start in starts)


def read_few_documents(source: Source) -> str | None:
    """The whole text of a corpus of few documents, cut into more of them; None if it has many, or is large.

    What is held out of each piece is of all parts of the text. The end alone would be of one book, or one play.
    """
    if len(source.files) >= FEW_DOCUMENTS:
        return None
    text, is_whole = _read_beginning(source, READ_CHARS)
    return cut_evenly(text) if is_whole and text.count(SEPARATOR) + 1 < FEW_DOCUMENTS else None


def cut_evenly(text: str) -> str:
    """The same text in pieces of about equal length, which begin with a line, with a separator between them."""
    num_pieces = max(1, min(FEW_DOCUMENTS, len(text) // MIN_PIECE_CHARS))
    starts = [_find_line(text, number * len(text) // num_pieces) for number in range(num_pieces)]
    return SEPARATOR.join(text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True))


def _find_line(text: str, start: int) -> int:
    """Where the next line begins, if one does soon."""
    return 0 if start == 0 else max(start, text.find("\n", start, start + MAX_LINE) + 1)


def _read_beginning(source: Source, max_chars: int) -> tuple[str, bool]:
    parts: list[str] = []
    left = max_chars
    for document in read_documents(source, ReadingOptions()):
        parts.append(document[:left])
        left -= len(document)
        if left < 0:
            return SEPARATOR.join(parts), False
    return SEPARATOR.join(parts), True
