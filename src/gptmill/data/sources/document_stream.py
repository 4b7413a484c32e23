"""Reads a file, or a part of one, as a stream of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.cutting import cut_documents, is_text
from gptmill.data.sources.defects import EMPTY_DOCUMENT, EMPTY_FILE, Defect
from gptmill.data.sources.failures import ReadingError, Record, make_reading_error
from gptmill.data.sources.formats import find_format
from gptmill.data.sources.hub import read_hub
from gptmill.data.sources.remote_files import make_remote_error
from gptmill.data.sources.source import SOURCES, Part, Source, SourceFile, find_own_source
from gptmill.data.sources.stored_file import StoredFile

ADVICE = ", or skip what cannot be read with gptmill prepare --on_error skip"


class DocumentStream:
    """An iterator of documents: never empty or only white space, never longer than MAX_DOCUMENT_CHARS.

    Iterate over `items` instead to see the defects too, in the places where they occurred.
    """

    def __init__(
        self,
        file: SourceFile,
        records: Iterator[Record],
        *,
        is_whole_file: bool,
        stops_at_errors: bool,
        count_bytes: Callable[[], int],
        close: Callable[[], None],
    ) -> None:
        self._file = file
        self._records = cut_documents(records)
        self._is_whole_file = is_whole_file
        self._stops_at_errors = stops_at_errors
        self._count_bytes = count_bytes
        self._close = close
        self.items = self._read_items()

    @property
    def bytes_read(self) -> int:
        """Bytes of the stored file consumed so far."""
        return self._count_bytes()

    def close(self) -> None:
        self._close()

    def __iter__(self) -> DocumentStream:
        return self

    def __next__(self) -> str:
        return next(item for item in self.items if isinstance(item, str))

    def __enter__(self) -> DocumentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_items(self) -> Iterator[str | Defect]:
        empty = Defect(EMPTY_DOCUMENT, self._file.name)
        is_empty = True
        for record in self._read_records():
            is_empty = False
            if isinstance(record, str):
                yield record if is_text(record) else empty
            elif self._stops_at_errors:
                raise ReadingError(str(record) + (ADVICE if record.kind != "no_text" else ""), record.kind) from None
            else:
                # Without the advice, and by its relative name: the report does not depend on where the corpus is.
                problem, _, _ = str(record).rpartition("; ")
                yield Defect(record.kind, problem.replace(self._file.uri, self._file.name))
        if is_empty and self._is_whole_file:
            yield Defect(EMPTY_FILE, self._file.name)

    def _read_records(self) -> Iterator[Record]:
        try:
            yield from self._records
        except ReadingError as error:  # the rest of the file is lost
            yield error
        except UserError:
            raise
        except OSError as error:
            described = make_reading_error(self._file.uri, error)
            if not isinstance(described, ReadingError):
                raise described from None
            yield described
        except Exception as error:
            if not self._file.is_remote:
                raise
            raise make_remote_error(self._file.uri, error) from None


def open_documents(file: SourceFile, options: ReadingOptions, part: Part | None = None) -> DocumentStream:
    """Opens the documents of a file, or of one of the parts that list_parts returned for it."""
    stops_at_errors = options.on_error == "stop"
    if file.is_streamed:
        own = find_own_source(file.uri)
        records = read_hub(file.uri, options) if own is None else SOURCES[own](file.uri.partition(":")[2], options)
        return DocumentStream(
            file,
            records,
            is_whole_file=True,
            stops_at_errors=stops_at_errors,
            count_bytes=lambda: 0,
            close=records.close,
        )
    stored = StoredFile(file, options.max_expansion)
    read = find_format(file.path_name)
    return DocumentStream(
        file,
        read(stored, options, part),
        is_whole_file=part is None or part.size_bytes == file.size_bytes,
        stops_at_errors=stops_at_errors,
        count_bytes=lambda: stored.bytes_read,
        close=stored.close,
    )


def read_documents(
    source: Source, options: ReadingOptions, note: Callable[[Defect], None] = lambda _: None
) -> Iterator[str]:
    """Yields all documents of a corpus in order; calls `note` with each defect."""
    for file in source.files:
        with open_documents(file, options) as documents:
            for item in documents.items:
                if isinstance(item, str):
                    yield item
                else:
                    note(item)
