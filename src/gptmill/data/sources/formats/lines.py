"""Reads lines of bounded length, each with its byte offset."""

from __future__ import annotations

import io
from collections.abc import Iterator

from gptmill.config.errors import UserError
from gptmill.data.sources.failures import make_decoding_error

MAX_LINE_BYTES = 2**28


def read_lines(data: io.BufferedReader, uri: str, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line including its line break) from the current position, which is `offset` in the file."""
    while line := data.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{uri} has a line of more than {MAX_LINE_BYTES // 2**20} MiB at offset {offset}; "
                f"give one record per line, or name a text file .txt"
            )
        yield offset, line
        offset += len(line)


def decode_line(line: bytes, uri: str, offset: int) -> str:
    """Decodes a line as UTF-8; drops the byte order mark of the first line."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise make_decoding_error(uri, error, offset + error.start) from None
    return text.removeprefix("\ufeff") if offset == 0 else text
