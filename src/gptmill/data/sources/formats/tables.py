"""CSV and TSV: one document per row of the text column; the first row is the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.decoding import check_escaped
from gptmill.data.sources.failures import ReadingError, Record, make_decoding_error, make_field_error
from gptmill.data.sources.formats.lines import MAX_LINE_BYTES, read_lines
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

MAX_ROW_FIELDS = 2**22  # of a row, each of which takes up to 60 bytes
END = "\ue000end of file\ue000"  # appended to detect unclosed quotes: without any, it parses as a row of its own


def read_csv(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    del part
    return _read_rows(stored, options, ",")


def read_tsv(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    del part
    return _read_rows(stored, options, "\t")


def _read_rows(stored: StoredFile, options: ReadingOptions, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    lines_of_row = RowLines(_decode_lines(stored, options), delimiter, stored.uri)
    rows = csv.reader(chain(lines_of_row, [END]), delimiter=delimiter)
    column, number = None, 0
    while True:
        lines_of_row.end_row()
        try:
            row = next(rows, [END])
        except csv.Error as error:
            message = f"{stored.uri}:{rows.line_num} is not valid: {error}; fix the row or remove it"
            yield ReadingError(message, "malformed")
            continue
        if row == [END]:
            return
        if column is None:
            if options.text_field not in row:
                raise make_field_error(stored.uri, "column", options.text_field, row)
            header, column = row, row.index(options.text_field)
            continue
        number += 1
        if row and row[-1].endswith(END):
            raise ReadingError(
                f"{stored.uri} ends inside quotes, which were opened in row {number} after the header; it may "
                f"be truncated: copy it again, or close the quotes"
            )
        if len(row) > column:
            yield from check_escaped(row[column], f"{stored.uri}:{rows.line_num}", options)
        elif row:
            yield ReadingError(
                f"{stored.uri}:{rows.line_num} has {len(row)} of {len(header)} columns, none of them "
                f"{options.text_field!r}; fix the row or remove it",
                "malformed",
            )


def _decode_lines(stored: StoredFile, options: ReadingOptions) -> Iterator[str]:
    """Yields the lines. A row may span several, so undecodable bytes are escaped until the row is complete."""
    errors = "strict" if options.on_error == "stop" else "surrogateescape"
    for offset, line in read_lines(stored.open_data(), stored.uri):
        try:
            text = line.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise make_decoding_error(stored.uri, error, offset + error.start) from None
        yield text if offset else text.removeprefix("\ufeff")


class RowLines:
    """The lines of a table, with a limit to those of one row: quoted fields may span any number of lines."""

    def __init__(self, lines: Iterator[str], delimiter: str, uri: str) -> None:
        self._lines = lines
        self._delimiter = delimiter
        self._uri = uri
        self.end_row()

    def end_row(self) -> None:
        """Starts counting anew."""
        self._chars = self._fields = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._chars += len(line)
            self._fields += line.count(self._delimiter)
            if self._chars > MAX_LINE_BYTES or self._fields > MAX_ROW_FIELDS:
                raise ReadingError(
                    f"{self._uri} has a row of more than {MAX_LINE_BYTES >> 20} MiB or {MAX_ROW_FIELDS:,} fields; "
                    f"close its quotes, or leave it out"
                )
            yield line
