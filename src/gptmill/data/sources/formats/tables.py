"""CSV and TSV: one document per row of the text column; the first row is the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import make_field_error
from gptmill.data.sources.formats.lines import MAX_LINE_BYTES, decode_line, read_lines
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

END = "\ue000end of file\ue000"  # appended to detect unclosed quotes: without any, it parses as a row of its own


def read_csv(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    del part
    return _read_rows(stored, options, ",")


def read_tsv(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    del part
    return _read_rows(stored, options, "\t")


def _read_rows(stored: StoredFile, options: ReadingOptions, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = read_lines(stored.open_data(), stored.uri)
    texts = (decode_line(line, stored.uri, offset) for offset, line in lines)
    rows = csv.reader(chain(texts, [END]), delimiter=delimiter)
    try:
        header = next(rows, None)
        if header is None or header == [END]:
            return
        if options.text_field not in header:
            raise make_field_error(stored.uri, "column", options.text_field, header)
        column, number = header.index(options.text_field), 1
        for row in rows:
            if row == [END]:
                return
            if row and row[-1].endswith(END):
                raise UserError(
                    f"{stored.uri} ends inside quotes, which were opened in row {number} after the header; it may "
                    f"be truncated: copy it again, or close the quotes"
                )
            number += 1
            if len(row) > column:
                yield row[column]
            elif row:
                raise UserError(
                    f"{stored.uri}:{rows.line_num} has {len(row)} of {len(header)} columns, none of them "
                    f"{options.text_field!r}; fix the row or remove it"
                )
    except csv.Error as error:
        raise UserError(f"{stored.uri}:{rows.line_num} is not valid: {error}; fix the row or remove it") from None
