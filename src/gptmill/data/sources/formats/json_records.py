"""JSON and JSON Lines: a record or a string per line, or one value that contains them all."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from gptmill.config.json_text import parse_record
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.decoding import decode_record
from gptmill.data.sources.failures import (
    ReadingError,
    Record,
    make_field_error,
    make_type_error,
)
from gptmill.data.sources.formats.lines import BYTE_ORDER_MARK, MAX_LINE_BYTES, decode_line, read_lines
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

MAX_VALUE_BYTES = 2**28  # of a file that is a single value and must be parsed in memory
BLOCK_BYTES = 2**20
SURROGATE_ESCAPE = re.compile(r"\\u[dD]")  # also matches U+D000 to U+D7FF, which are no surrogates


def read_json_lines(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
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


def read_json(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
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
        raise ReadingError(
            f"{stored.uri} is one JSON value of more than {MAX_VALUE_BYTES >> 20} MiB, too large to parse in "
            f"memory; convert it to JSON Lines: jq -c '.[]' FILE.json > FILE.jsonl",
            "malformed",
        )
    if not content.strip():
        return
    for text in decode_record(content.removeprefix(BYTE_ORDER_MARK), stored.uri, 0, options):
        yield from [text] if isinstance(text, ReadingError) else _read_value(text, stored.uri, options)


def _read_value(content: str, uri: str, options: ReadingOptions) -> Iterator[Record]:
    value = _parse_file(content, uri)
    for number, record in enumerate(_find_records(value, options.text_field, uri), start=1):
        text = find_text(record, options.text_field, lambda: f"record {number} of {uri}")  # noqa: B023
        yield replace_lone_surrogates(text) if isinstance(text, str) else text


def find_text(record: Any, field: str, where: Callable[[], str]) -> Record:
    """Returns the text of a record; empty if its text field is null."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        message = f"{where()} is neither a record nor a string; give each document as {{{field!r}: ...}}"
        return ReadingError(message, "malformed")
    if field not in record:
        return make_field_error(where(), "field", field, list(record))
    text = record[field]
    if text is not None and not isinstance(text, str):
        return make_type_error(where(), field, type(text).__name__)
    return text or ""


def replace_lone_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON can escape and UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_records(
    lines: Iterator[tuple[int, bytes]], stored: StoredFile, options: ReadingOptions, start: int = 0
) -> Iterator[Record]:
    """Yields the texts of lines, of which the first begins at byte `start`."""
    number = 0

    def locate() -> str:
        if start and options.on_error != "stop":  # many errors, for each of which the lines would be counted
            return f"{stored.uri} at offset {offset}"
        return f"{stored.uri}:{_count_lines(stored, start) + number}"

    for number, (offset, line) in enumerate(lines, start=1):  # noqa: B007, used by locate
        for content in decode_line(line, stored.uri, offset, options):
            if isinstance(content, ReadingError):
                yield content
                continue
            if not content or content.isspace():
                continue
            try:
                record = parse_record(content)
            except ValueError as error:
                yield ReadingError(f"{locate()} is not JSON: {error}; fix the line or remove it", "malformed")
                continue
            text = find_text(record, options.text_field, locate)
            if isinstance(text, str) and SURROGATE_ESCAPE.search(content):
                text = replace_lone_surrogates(text)
            yield text


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
        return isinstance(parse_record(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")), dict | str)
    except ValueError:
        return False


def _parse_file(content: str, uri: str) -> Any:
    try:
        return parse_record(content)
    except json.JSONDecodeError as error:
        message = f"{uri}:{error.lineno} is not JSON: {error.msg}; fix the file or leave it out"
    except ValueError as error:
        message = f"{uri} is JSON that cannot be read: {error}; leave it out"
    raise ReadingError(message, "malformed")


def _find_records(value: Any, field: str, uri: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        message = f"{uri} has no records; give an array of them, or one record per line in a .jsonl file"
        raise ReadingError(message, "malformed")
    if field in value:
        return value[field] if isinstance(value[field], list) else [value]
    arrays = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict | str)]
    if len(arrays) != 1:
        raise make_field_error(uri, "field", field, list(value))
    return list(arrays[0])
