"""Reads a file, or a part of one, as a stream of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.cutting import cut_documents
from gptmill.data.sources.failures import make_reading_error
from gptmill.data.sources.formats import find_format
from gptmill.data.sources.hub import read_hub
from gptmill.data.sources.remote_files import make_remote_error
from gptmill.data.sources.source import Part, Source, SourceFile
from gptmill.data.sources.stored_file import StoredFile


class DocumentStream:
    """An iterator of documents: never empty or only white space, never longer than MAX_DOCUMENT_CHARS."""

    def __init__(
        self, file: SourceFile, documents: Iterator[str], count_bytes: Callable[[], int], close: Callable[[], None]
    ) -> None:
        self._file = file
        self._documents = documents
        self._count_bytes = count_bytes
        self._close = close

    @property
    def bytes_read(self) -> int:
        """Bytes of the stored file consumed so far."""
        return self._count_bytes()

    def close(self) -> None:
        self._close()

    def __iter__(self) -> DocumentStream:
        return self

    def __next__(self) -> str:
        try:
            return next(self._documents)
        except (StopIteration, UserError):
            raise
        except OSError as error:
            raise make_reading_error(self._file.uri, error) from None
        except Exception as error:
            if not self._file.is_remote:
                raise
            raise make_remote_error(self._file.uri, error) from None

    def __enter__(self) -> DocumentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_documents(file: SourceFile, options: ReadingOptions, part: Part | None = None) -> DocumentStream:
    """Opens the documents of a file, or of one of the parts that list_parts returned for it."""
    if file.is_on_hub:
        records = read_hub(file.uri, options)
        return DocumentStream(file, cut_documents(records), lambda: 0, records.close)
    stored = StoredFile(file, options.max_expansion)
    read = find_format(file.path_name)
    documents = cut_documents(read(stored, options, part))
    return DocumentStream(file, documents, lambda: stored.bytes_read, stored.close)


def read_documents(source: Source, options: ReadingOptions) -> Iterator[str]:
    """Yields all documents of a corpus in order."""
    for file in source.files:
        with open_documents(file, options) as documents:
            yield from documents
