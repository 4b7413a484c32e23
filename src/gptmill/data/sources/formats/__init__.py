"""Format readers: bytes to documents. Add a new one to `FORMATS`; any file may be compressed (`COMPRESSIONS`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePath

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.compression import split_compression
from gptmill.data.sources.failures import Record
from gptmill.data.sources.formats.json_records import read_json, read_json_lines
from gptmill.data.sources.formats.parquet import read_parquet
from gptmill.data.sources.formats.tables import read_csv, read_tsv
from gptmill.data.sources.formats.text import read_python, read_text
from gptmill.data.sources.formats.web import read_html, read_warc, read_wet
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

Reader = Callable[[StoredFile, ReadingOptions, Part | None], Iterator[Record]]

PROSE_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc")
CODE_SUFFIXES = (".c", ".cc", ".cpp", ".h", ".hpp", ".go", ".java", ".js", ".rb", ".rs", ".sh", ".ts")

FORMATS: dict[str, Reader] = {
    **dict.fromkeys((*PROSE_SUFFIXES, *CODE_SUFFIXES), read_text),
    ".py": read_python,
    ".html": read_html,
    ".htm": read_html,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".warc": read_warc,
    ".wet": read_wet,
}
SEPARABLE = (read_text, read_python)  # the formats that --separator applies to


def find_format(name: str) -> Reader:
    """Returns the reader for a file name; files of unknown suffix are read as plain text."""
    return FORMATS.get(find_suffix(name), read_text)


def is_known(name: str) -> bool:
    """Whether the name has a suffix of FORMATS, optionally followed by that of a compression."""
    return find_suffix(name) in FORMATS


def is_one_document(name: str, options: ReadingOptions) -> bool:
    """Whether a file of this name is one document rather than a collection."""
    read = find_format(name)
    return read is read_html or (read in SEPARABLE and options.separator is None)


def find_suffix(name: str) -> str:
    """Returns the suffix of a file name without that of its compression."""
    return PurePath(split_compression(name)[0]).suffix.lower()
