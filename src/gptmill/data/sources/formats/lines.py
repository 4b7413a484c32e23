"""Reads lines of bounded length, each with its byte offset."""

from __future__ import annotations

import io
from collections.abc import Iterator

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.decoding import decode_record
from gptmill.data.sources.failures import ReadingError, Record

MAX_LINE_BYTES = 2**28
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(data: io.BufferedReader, uri: str, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line including its line break) from the current position, which is `offset` in the file."""
    while line := data.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ReadingError(
                f"{uri} has a line of more than {MAX_LINE_BYTES // 2**20} MiB at offset {offset}; "
                f"give one record per line, or name a text file .txt",
                "malformed",
            )
        yield offset, line
        offset += len(line)


def decode_line(line: bytes, uri: str, offset: int, options: ReadingOptions) -> list[Record]:
    """Decodes a line like decode_record; drops the byte order mark of the first line."""
    if offset or not line.startswith(BYTE_ORDER_MARK):
        return decode_record(line, uri, offset, options)
    return decode_record(line.removeprefix(BYTE_ORDER_MARK), uri, len(BYTE_ORDER_MARK), options)
