"""Plain text: a file is one document, or several with a separator between them."""

from __future__ import annotations

import codecs
import io
import tokenize
from collections.abc import Iterator

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.cutting import DocumentCutter
from gptmill.data.sources.failures import make_decoding_error
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

BLOCK_BYTES = 2**20
BYTE_ORDER_MARK = "\ufeff"
HEADER_BYTES = 2**12  # more than the two lines in which a Python file may declare its encoding


def read_text(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """UTF-8."""
    del part  # text is read whole
    yield from _read(stored.open_data(), "utf-8", stored.address, options)


def read_python(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """In the encoding that a Python file declares in its first lines."""
    del part
    data = stored.open_data()
    encoding = _find_encoding(data.peek(HEADER_BYTES)[:HEADER_BYTES])
    try:
        b" ".decode(encoding, errors="ignore")
    except LookupError as error:
        raise UserError(
            f"{stored.address} declares an encoding that is none for text ({error}); leave it out"
        ) from None
    yield from _read(data, encoding, stored.address, options)


def decode_separator(separator: str) -> str:
    """The separator that a user means, who can hardly type a line break."""
    decoded = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    if not decoded:
        raise UserError("--separator is empty; give the text that stands between two documents, or leave it out")
    return decoded


def _read(data: io.BufferedReader, encoding: str, address: str, options: ReadingOptions) -> Iterator[str]:
    pieces = _decode(data, encoding, address)
    cutter = DocumentCutter()
    if options.separator is None:
        for piece in pieces:
            yield from cutter.add(piece)
    else:
        for piece, is_end in split_at(pieces, decode_separator(options.separator)):
            yield from cutter.add(piece)
            if is_end:
                yield from cutter.finish()
    yield from cutter.finish()


def _decode(data: io.BufferedReader, encoding: str, address: str) -> Iterator[str]:
    """Text block by block, without a mark of byte order at its start."""
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    offset = 0
    while True:
        block = data.read(BLOCK_BYTES)
        pending, _ = decoder.getstate()  # the bytes of a character that the last block did not complete
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise make_decoding_error(address, error, offset - len(pending) + error.start) from None
        if offset == 0:
            text = text.removeprefix(BYTE_ORDER_MARK)
        offset += len(block)
        if text:
            yield text
        if not block:
            return


def split_at(pieces: Iterator[str], separator: str) -> Iterator[tuple[str, bool]]:
    """Pieces without the separators, and whether a document ends there.

    One line break after a separator goes as well, unless the separator brings its own.
    """
    skip = _skip_nothing if separator.endswith(("\n", "\r")) else _skip_line_break
    text, start, is_after = "", 0, False
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while True:
            if is_after:
                if len(text) - start < 2:  # "\r\n" may follow
                    break
                start, is_after = skip(text, start), False
            place = text.find(separator, start)
            if place < 0:
                break
            yield text[start:place], True
            start, is_after = place + len(separator), True
        if not is_after:
            safe = len(text) - len(separator) + 1  # what follows may be the beginning of a separator
            if safe > start:
                yield text[start:safe], False
                start = safe
    if is_after:
        start = skip(text, start)
    while (place := text.find(separator, start)) >= 0:  # only one as short as what was held back
        yield text[start:place], True
        start = skip(text, place + len(separator))
    yield text[start:], True


def _skip_line_break(text: str, start: int) -> int:
    for line_break in ("\r\n", "\n", "\r"):
        if text.startswith(line_break, start):
            return start + len(line_break)
    return start


def _skip_nothing(text: str, start: int) -> int:  # noqa: ARG001
    return start


def _find_encoding(header: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(header).readline)
    except SyntaxError:
        return "utf-8"
    return "utf-8" if encoding == "utf-8-sig" else encoding  # the mark is dropped here, so that offsets stay true
