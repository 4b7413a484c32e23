"""Lines of bytes, of bounded length, each with the place where it begins."""

from __future__ import annotations

import io
from collections.abc import Iterator

from gptmill.config.errors import UserError
from gptmill.data.sources.failures import make_decoding_error

MAX_LINE_BYTES = 2**28


def read_lines(data: io.BufferedReader, address: str, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Lines with their ends, from where `data` stands, which is `offset` in the file."""
    while line := data.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{address} has a line of more than {MAX_LINE_BYTES // 2**20} MiB at offset {offset}; "
                f"give one record per line, or name a text file .txt"
            )
        yield offset, line
        offset += len(line)


def decode_line(line: bytes, address: str, offset: int) -> str:
    """A line of UTF-8, without a mark of byte order where it is the first."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise make_decoding_error(address, error, offset + error.start) from None
    return text.removeprefix("\ufeff") if offset == 0 else text
