"""Plain text: one document per file, or several divided by a separator."""

from __future__ import annotations

import codecs
import io
import tokenize
from collections.abc import Iterator

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.cutting import DocumentCutter
from gptmill.data.sources.decoding import check_escaped
from gptmill.data.sources.failures import ReadingError, Record, make_decoding_error
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

BLOCK_BYTES = 2**20
BYTE_ORDER_MARK = "\ufeff"
HEADER_BYTES = 2**12  # more than the two lines in which a Python file may declare its encoding


def read_text(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads UTF-8 text."""
    del part  # text is read whole
    yield from _read(stored.open_data(), "utf-8", stored.uri, options)


def read_python(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads Python source in the encoding that its first lines declare (PEP 263)."""
    del part
    data = stored.open_data()
    encoding = _find_encoding(data.peek(HEADER_BYTES)[:HEADER_BYTES])
    try:
        b" ".decode(encoding, errors="ignore")
    except LookupError as error:
        message = f"{stored.uri} declares an encoding that is not a text encoding ({error}); leave it out"
        raise ReadingError(message, "undecodable") from None
    yield from _read(data, encoding, stored.uri, options)


def decode_separator(separator: str) -> str:
    r"""Replaces the escapes \r, \n and \t, which are hard to type on a command line."""
    decoded = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    if not decoded:
        raise UserError("--separator is empty; give the text between two documents, or leave it out")
    return decoded


def _read(data: io.BufferedReader, encoding: str, uri: str, options: ReadingOptions) -> Iterator[Record]:
    if options.on_error == "stop":
        yield from _cut(_decode(data, encoding, uri, "strict"), options)
        return
    for number, document in enumerate(_cut(_decode(data, encoding, uri, "surrogateescape"), options), start=1):
        yield from check_escaped(document, uri if number == 1 else f"document {number} of {uri}", options)


def _cut(pieces: Iterator[str], options: ReadingOptions) -> Iterator[str]:
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


def _decode(data: io.BufferedReader, encoding: str, uri: str, errors: str) -> Iterator[str]:
    """Yields decoded text block by block, without a byte order mark."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    offset = 0
    while True:
        block = data.read1(BLOCK_BYTES)  # read() would lose what precedes damage
        pending, _ = decoder.getstate()  # the bytes of an incomplete character at the end of the last block
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise make_decoding_error(uri, error, offset - len(pending) + error.start) from None
        if offset == 0:
            text = text.removeprefix(BYTE_ORDER_MARK)
        offset += len(block)
        if text:
            yield text
        if not block:
            return


def split_at(pieces: Iterator[str], separator: str) -> Iterator[tuple[str, bool]]:
    """Yields pieces without the separators, each with whether a document ends there.

    One line break after a separator is dropped too, unless the separator itself ends with one.
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
            end = text.find(separator, start)
            if end < 0:
                break
            yield text[start:end], True
            start, is_after = end + len(separator), True
        if not is_after:
            safe = len(text) - len(separator) + 1  # the rest may be the beginning of a separator
            if safe > start:
                yield text[start:safe], False
                start = safe
    if is_after:
        start = skip(text, start)
    while (end := text.find(separator, start)) >= 0:  # a short separator may fit into the text that was held back
        yield text[start:end], True
        start = skip(text, end + len(separator))
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
    return "utf-8" if encoding == "utf-8-sig" else encoding  # _decode drops the mark, so that offsets stay correct
