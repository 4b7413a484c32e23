"""JSON and JSON Lines: a record or a string per line, or one value that contains them all."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import make_decoding_error, make_field_error, make_type_error
from gptmill.data.sources.formats.json_values import parse_values
from gptmill.data.sources.formats.lines import MAX_LINE_BYTES, decode_line, read_lines
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

MAX_VALUE_BYTES = 2**28  # of a file that is a single value and must be parsed in memory
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK_BYTES = 2**20
SURROGATE_ESCAPE = re.compile(r"\\u[dD]")  # also matches U+D000 to U+D7FF, which are no surrogates


def read_json_lines(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """Reads one record per line. A line belongs to the part in which it begins."""
    data = stored.open_data()
    if part is None or (part.start == 0 and part.stop == stored.size_bytes):
        yield from _read_records(read_lines(data, stored.uri), stored, options)
        return
    start = part.start
    if start > 0:
        data.seek(start - 1)
        start += sum(len(line) for _, line in itertools.islice(read_lines(data, stored.uri), 1)) - 1
    yield from _read_records(_read_part(data, start, stored, part), stored, options, start)


def _read_part(data: io.BufferedReader, start: int, stored: StoredFile, part: Part) -> Iterator[tuple[int, bytes]]:
    for offset, line in read_lines(data, stored.uri, start):
        if offset >= part.stop:
            break
        stored.bytes_read = min(offset + len(line), part.stop) - part.start
        yield offset, line
    stored.bytes_read = part.stop - part.start


def read_json(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """Reads an array of records or strings, an object that contains one, a single record, or JSON Lines."""
    del part
    data = stored.open_data()
    head = data.readline(MAX_LINE_BYTES)
    if head.endswith(b"\n") and _is_record(head) and data.peek(1):
        lines = itertools.chain([(0, head)], read_lines(data, stored.uri, len(head)))
        yield from _read_records(lines, stored, options)
        return
    content = head + data.read(MAX_VALUE_BYTES)
    if len(content) >= MAX_VALUE_BYTES:
        raise UserError(
            f"{stored.uri} is one JSON value of more than {MAX_VALUE_BYTES >> 20} MiB, too large to parse in "
            f"memory; convert it to JSON Lines: jq -c '.[]' FILE.json > FILE.jsonl"
        )
    if not content.strip():
        return
    value = _parse_file(content.removeprefix(BYTE_ORDER_MARK), stored.uri)
    for number, record in enumerate(_find_records(value, options.text_field, stored.uri), start=1):
        text = find_text(record, options.text_field, lambda: f"record {number} of {stored.uri}")  # noqa: B023
        if text is not None:
            yield replace_lone_surrogates(text)


def find_text(record: Any, field: str, where: Callable[[], str]) -> str | None:
    """Returns the text of a record; None if its text field is null."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise UserError(f"{where()} is neither a record nor a string; give each document as {{{field!r}: ...}}")
    if field not in record:
        raise make_field_error(where(), "field", field, list(record))
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise make_type_error(where(), field, type(text).__name__)
    return text


def replace_lone_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON can escape and UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_records(
    lines: Iterator[tuple[int, bytes]], stored: StoredFile, options: ReadingOptions, start: int = 0
) -> Iterator[str]:
    """Yields the texts of lines, of which the first begins at byte `start`."""
    number = 0

    def locate() -> str:
        return f"{stored.uri}:{_count_lines(stored, start) + number}"

    for number, (offset, line) in enumerate(lines, start=1):  # noqa: B007, used by locate
        content = decode_line(line, stored.uri, offset)
        if not content or content.isspace():
            continue
        try:
            record = parse_values(content)
        except ValueError as error:
            raise UserError(f"{locate()} is not JSON: {error}; fix the line or remove it") from None
        text = find_text(record, options.text_field, locate)
        if text is not None:
            yield replace_lone_surrogates(text) if SURROGATE_ESCAPE.search(content) else text


def _count_lines(stored: StoredFile, offset: int) -> int:
    """Counts the lines before a byte offset. Slow, so used for error messages only."""
    data = stored.open_data() if offset else None
    count = 0
    while data and offset and (block := data.read(min(offset, BLOCK_BYTES))):
        count += block.count(b"\n")
        offset -= len(block)
    return count


def _is_record(line: bytes) -> bool:
    """Whether a line is a complete record, so that the file is JSON Lines."""
    try:
        return isinstance(parse_values(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")), dict | str)
    except ValueError:
        return False


def _parse_file(content: bytes, uri: str) -> Any:
    try:
        return parse_values(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise make_decoding_error(uri, error, error.start) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{uri}:{error.lineno} is not JSON: {error.msg}; fix the file or leave it out") from None
    except ValueError as error:
        raise UserError(f"{uri} is JSON that cannot be read: {error}; leave it out") from None


def _find_records(value: Any, field: str, uri: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        raise UserError(f"{uri} has no records; give an array of them, or one record per line in a .jsonl file")
    if field in value:
        return value[field] if isinstance(value[field], list) else [value]
    arrays = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict | str)]
    if len(arrays) != 1:
        raise make_field_error(uri, "field", field, list(value))
    return list(arrays[0])
