"""Divides large files into parts that several processes can read in parallel."""

from __future__ import annotations

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import ReadingError, make_reading_error
from gptmill.data.sources.formats import find_format
from gptmill.data.sources.formats.json_records import read_json_lines
from gptmill.data.sources.formats.parquet import list_row_group_parts, read_parquet
from gptmill.data.sources.source import Part, SourceFile
from gptmill.data.sources.stored_file import StoredFile

SMALL_FILE_BYTES = 4 * 2**20
PART_BYTES = 8 * 2**20


def list_parts(file: SourceFile, options: ReadingOptions) -> tuple[Part, ...] | None:
    """Returns the parts of a file, or None if it must be read sequentially, such as a large compressed file."""
    if file.is_streamed or file.size_bytes == 0:
        return None
    if file.size_bytes <= SMALL_FILE_BYTES:
        return (Part(0, file.size_bytes, file.size_bytes),)
    stored = StoredFile(file, options.max_expansion)
    try:
        read = find_format(file.path_name)
        if read is read_json_lines and stored.plain_path is not None:
            starts = range(0, file.size_bytes, PART_BYTES)
            stops = [*starts[1:], file.size_bytes]
            return tuple(Part(start, stop, stop - start) for start, stop in zip(starts, stops, strict=True))
        if read is read_parquet and not stored.is_compressed:
            return list_row_group_parts(stored, options, PART_BYTES)
        return None
    except ReadingError:
        return None  # the reader reports the error
    except OSError as error:
        raise make_reading_error(file.uri, error) from None
    finally:
        stored.close()
