"""Divides a source into chunks of work. The boundaries depend on the source alone, never on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Defect, Part, SourceFile, list_parts, open_documents

CHUNK_BYTES = 2 * 2**20  # large enough to make the overhead per chunk negligible, small enough to keep many in memory
CHUNK_FILES = 1024

Item = str | Defect


@dataclass(frozen=True)
class Position:
    """Where a chunk begins: a file of the source and the number of chunks before it in that file."""

    file_number: int
    chunk: int


START = Position(0, 0)


@dataclass(frozen=True)
class Extent:
    """A file, or a part of one, that a worker reads."""

    file_number: int
    file: SourceFile
    part: Part


@dataclass(frozen=True)
class Chunk:
    """Work for one process: file extents to read, or items of a file that must be read sequentially."""

    next: Position
    source_bytes: int
    extents: tuple[Extent, ...] = ()
    file_number: int = 0
    items: tuple[Item, ...] = ()

    def read(self, options: ReadingOptions) -> Iterator[tuple[int, Item]]:
        """Yields (file number, text) of each document, and the defects between them."""
        for item in self.items:
            yield self.file_number, item
        for extent in self.extents:
            with open_documents(extent.file, options, extent.part) as documents:
                for item in documents.items:
                    yield extent.file_number, item


def measure(item: Item) -> int:
    """The size of an item in memory, in characters. Defects count too: a file may have nothing else."""
    return len(item) if isinstance(item, str) else len(item.message)


def make_chunks(files: tuple[SourceFile, ...], options: ReadingOptions, start: Position) -> Iterator[Chunk]:
    """Yields the chunks from `start` on. Groups small files; reads sequential files here, the workers read the rest."""
    group: list[Extent] = []
    group_bytes = 0
    for number in range(start.file_number, len(files)):
        skipped = start.chunk if number == start.file_number else 0
        parts = list_parts(files[number], options)
        extents = [Extent(number, files[number], part) for part in parts or ()]
        if len(extents) == 1 and not skipped:
            group += extents
            group_bytes += extents[0].part.size_bytes
            if group_bytes >= CHUNK_BYTES or len(group) >= CHUNK_FILES:
                yield _make_group(group, number)
                group, group_bytes = [], 0
            continue
        if group:
            yield _make_group(group, number - 1)
            group, group_bytes = [], 0
        if parts is None:
            yield from _read_stream(number, files[number], options, skipped)
        for chunks_done, extent in enumerate(extents[skipped:], start=skipped + 1):
            yield Chunk(Position(number, chunks_done), extent.part.size_bytes, (extent,))
    if group:
        yield _make_group(group, len(files) - 1)


def _make_group(extents: list[Extent], last_file: int) -> Chunk:
    return Chunk(Position(last_file + 1, 0), sum(extent.part.size_bytes for extent in extents), tuple(extents))


def _read_stream(number: int, file: SourceFile, options: ReadingOptions, skipped: int) -> Iterator[Chunk]:
    """Yields the chunks of a sequential file; those that are already done are read and discarded."""
    with open_documents(file, options) as stream:
        items: list[Item] = []
        size = bytes_before = chunks_done = 0
        for item in stream.items:
            items.append(item)
            size += measure(item)
            if size >= CHUNK_BYTES:
                chunks_done += 1
                if chunks_done > skipped:
                    source_bytes = stream.bytes_read - bytes_before
                    yield Chunk(Position(number, chunks_done), source_bytes, (), number, tuple(items))
                bytes_before, items, size = stream.bytes_read, [], 0
        yield Chunk(Position(number + 1, 0), stream.bytes_read - bytes_before, (), number, tuple(items))
