"""Parquet: one document per row of the text column, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.decoding import decode_record
from gptmill.data.sources.expansion import ExpansionLimit
from gptmill.data.sources.failures import ReadingError, Record, make_extra_error, make_field_error, make_type_error
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

BUFFER_BYTES = 2**20
BATCH_BYTES = 4 * 2**20
MAX_BATCH_ROWS = 1024
MAX_GROUP_BYTES = 64 * 2**20  # files with larger row groups, as pandas writes them, are read sequentially


def read_parquet(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads the row groups of `part`; the bounds of a whole-file part are bytes, hence more than there are groups."""
    source = stored.open_seekable()
    parquet = _open(source, stored.uri, options.text_field)
    metadata = parquet.metadata
    sizes = _apportion_bytes(stored, metadata)
    start = part.start if part else 0
    stop = min(part.stop, metadata.num_row_groups) if part else metadata.num_row_groups
    # Pages are compressed and values repeat: a group can hold far more text than it stores.
    limit = ExpansionLimit(stored.uri, options.max_expansion if stored.size_bytes else None)
    stored.bytes_read = text_bytes = 0
    for group in range(start, stop):
        for record in _read_group(parquet, source, group, options, stored.uri):
            text_bytes += len(record) if isinstance(record, str) else 0
            limit.check(text_bytes, stored.bytes_read + sizes[group])
            yield record
        stored.bytes_read += sizes[group]


def list_row_group_parts(stored: StoredFile, options: ReadingOptions, part_bytes: int) -> tuple[Part, ...] | None:
    """Groups consecutive row groups into parts of up to `part_bytes` of text; None if a row group is too large."""
    parquet = _open(stored.open_seekable(), stored.uri, options.text_field)
    metadata = parquet.metadata
    sizes = _apportion_bytes(stored, metadata)
    parts: list[Part] = []
    start, text_bytes = 0, 0
    for group in range(metadata.num_row_groups):
        group_bytes = _measure_column(metadata, group, options.text_field, stored.uri)
        if group_bytes > MAX_GROUP_BYTES:
            return None
        if group > start and text_bytes + group_bytes > part_bytes:
            parts.append(Part(start, group, sum(sizes[start:group])))
            start, text_bytes = group, 0
        text_bytes += group_bytes
    return (*parts, Part(start, metadata.num_row_groups, sum(sizes[start:])))


def _open(source: Any, uri: str, field: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise make_extra_error("reading Parquet", "data") from None
    try:
        # Buffered, so that a column chunk as large as the file is not read at once.
        parquet = pyarrow.parquet.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
        schema = parquet.schema_arrow
        names = schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk or the network, not of the file
        reason = " ".join(str(error).split())
        raise ReadingError(
            f"{uri} is not a valid Parquet file, or truncated: {reason}; copy or download it again"
        ) from None
    if names.count(field) > 1:
        raise ReadingError(f"{uri} has {names.count(field)} columns {field!r}; write it again with one of them")
    if field not in names:
        raise make_field_error(uri, "column", field, names)
    kind = schema.field(field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)):
        raise make_type_error(uri, field, str(kind))
    return parquet


def _read_group(parquet: Any, source: Any, group: int, options: ReadingOptions, uri: str) -> Iterator[Record]:
    import pyarrow

    field = options.text_field
    try:
        row_bytes = _estimate_row_bytes(parquet, source, group, field, uri)
        batch_rows = max(1, min(MAX_BATCH_ROWS, int(BATCH_BYTES / row_bytes)))
        batches = parquet.iter_batches(batch_rows, row_groups=[group], columns=[field], use_threads=False)
        for batch in batches:
            yield from _read_column(batch.column(0), f"row group {group} of {uri}", options)
    except (pyarrow.ArrowException, OSError) as error:
        yield ReadingError(f"{uri} is corrupt in row group {group}: {error}; copy or download it again")


def _read_column(column: Any, where: str, options: ReadingOptions) -> Iterator[Record]:
    import pyarrow

    try:
        yield from (text or "" for text in column.to_pylist())
    except UnicodeDecodeError:  # before the first text
        plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        for content in plain.cast(pyarrow.large_binary()).to_pylist():
            yield from decode_record(content or b"", where, 0, options)


def _estimate_row_bytes(parquet: Any, source: Any, group: int, field: str, uri: str) -> float:
    """Returns the mean size of a text or, if that is more, the size of the longest one that rows may repeat."""
    import pyarrow.compute
    import pyarrow.parquet

    group_bytes = _measure_column(parquet.metadata, group, field, uri)
    reader = pyarrow.parquet.ParquetFile(
        source, metadata=parquet.metadata, read_dictionary=[field], buffer_size=BUFFER_BYTES, pre_buffer=False
    )
    try:
        batches = list(islice(reader.iter_batches(1, row_groups=[group], columns=[field], use_threads=False), 1))
    except (pyarrow.ArrowNotImplementedError, OSError):  # an encoding in which rows share prefixes with earlier ones
        return float(max(group_bytes, 1))
    lengths = [pyarrow.compute.binary_length(batch.column(0).dictionary) for batch in batches]
    longest = max((pyarrow.compute.max(each).as_py() or 0 for each in lengths), default=0)
    return float(max(group_bytes / max(parquet.metadata.row_group(group).num_rows, 1), longest, 1))


def _measure_column(metadata: Any, group: int, field: str, uri: str) -> int:
    """The bytes of a column in a row group; raises ReadingError for a row group that lacks it.

    No other column is looked at: pyarrow ends the process where the statistics of one are damaged.
    """
    try:
        paths = [metadata.schema.column(number).path for number in range(len(metadata.schema))]
        return int(metadata.row_group(group).column(paths.index(field)).total_uncompressed_size)
    except (ValueError, IndexError):  # UnicodeDecodeError among them
        raise ReadingError(f"{uri} has no column {field!r} in row group {group}; copy or download it again") from None


def _apportion_bytes(stored: StoredFile, metadata: Any) -> list[int]:
    """Divides the stored bytes of the file among its row groups in proportion to their size; they add up exactly."""
    weights = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    total = max(sum(weights), 1)
    sizes, done, given = [], 0, 0
    for weight in weights:
        done += weight
        sizes.append(stored.size_bytes * done // total - given)
        given += sizes[-1]
    return sizes
