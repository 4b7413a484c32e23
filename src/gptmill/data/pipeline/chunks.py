"""A source cut into chunks of work. The cuts depend on the source alone, never on who does the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Part, SourceFile, list_parts, open_documents

CHUNK_BYTES = 2 * 2**20  # enough that handing it over costs nothing, little enough that many fit in memory
CHUNK_FILES = 1024


@dataclass(frozen=True)
class Position:
    """Where a chunk begins: a file of the source, and how many chunks into it."""

    file_number: int
    chunk: int


START = Position(0, 0)


@dataclass(frozen=True)
class Extent:
    """A file, or a part of one, that a worker reads by itself."""

    file_number: int
    file: SourceFile
    part: Part


@dataclass(frozen=True)
class Chunk:
    """Work for one process: where to read documents, or documents that had to be read one after the other."""

    next: Position
    source_bytes: int
    extents: tuple[Extent, ...] = ()
    file_number: int = 0
    documents: tuple[str, ...] = ()

    def read(self, options: ReadingOptions) -> Iterator[tuple[int, str]]:
        """(number of its file, text) of each document."""
        for text in self.documents:
            yield self.file_number, text
        for extent in self.extents:
            with open_documents(extent.file, options, extent.part) as documents:
                for text in documents:
                    yield extent.file_number, text


def make_chunks(files: tuple[SourceFile, ...], options: ReadingOptions, start: Position) -> Iterator[Chunk]:
    """The chunks from `start` on. Small files are gathered; a long stream is read here, the rest by the workers."""
    gathered: list[Extent] = []
    gathered_bytes = 0
    for number in range(start.file_number, len(files)):
        skipped = start.chunk if number == start.file_number else 0
        parts = list_parts(files[number], options)
        extents = [Extent(number, files[number], part) for part in parts or ()]
        if len(extents) == 1 and not skipped:
            gathered += extents
            gathered_bytes += extents[0].part.size_bytes
            if gathered_bytes >= CHUNK_BYTES or len(gathered) >= CHUNK_FILES:
                yield _gather(gathered, number)
                gathered, gathered_bytes = [], 0
            continue
        if gathered:
            yield _gather(gathered, number - 1)
            gathered, gathered_bytes = [], 0
        if parts is None:
            yield from _read_stream(number, files[number], options, skipped)
        for place, extent in enumerate(extents[skipped:], start=skipped + 1):
            yield Chunk(Position(number, place), extent.part.size_bytes, (extent,))
    if gathered:
        yield _gather(gathered, len(files) - 1)


def _gather(extents: list[Extent], last_file: int) -> Chunk:
    return Chunk(Position(last_file + 1, 0), sum(extent.part.size_bytes for extent in extents), tuple(extents))


def _read_stream(number: int, file: SourceFile, options: ReadingOptions, skipped: int) -> Iterator[Chunk]:
    """A file that can only be read from its start: the chunks that are done already are read and let go."""
    with open_documents(file, options) as stream:
        texts: list[str] = []
        size = bytes_before = place = 0
        for text in stream:
            texts.append(text)
            size += len(text)
            if size >= CHUNK_BYTES:
                place += 1
                if place > skipped:
                    yield Chunk(Position(number, place), stream.bytes_read - bytes_before, (), number, tuple(texts))
                bytes_before, texts, size = stream.bytes_read, [], 0
        yield Chunk(Position(number + 1, 0), stream.bytes_read - bytes_before, (), number, tuple(texts))
