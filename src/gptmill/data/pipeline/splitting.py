"""Writes the documents of a chunk to their splits, in order, without duplicates."""

from __future__ import annotations

import numpy as np

from gptmill.data.cleaning import Drop, DuplicateIndex
from gptmill.data.pipeline.encoding import ALWAYS_TRAIN, EncodedChunk
from gptmill.data.pipeline.journal import Journal
from gptmill.data.pipeline.shard_writer import ShardWriter
from gptmill.data.sources import Defect
from gptmill.data.tokenizers.protocol import TokenArray


def write_chunk(encoded: EncodedChunk, journal: Journal, writers: list[ShardWriter], index: DuplicateIndex) -> None:
    """Drops duplicates and writes the rest; `writers` are those of training and validation."""
    train, val = writers
    run = PieceRun(encoded.tokens)
    end = 0
    for document in encoded.documents:
        if isinstance(document, Defect):
            journal.defects.add(document)
            continue
        drop = document.drop
        if (
            drop is None
            and document.keys is not None
            and (option := index.find_duplicate(document.keys, journal.chunks))
        ):
            drop = Drop(option)
        if drop:
            journal.report.add_dropped(drop, document.preview, document.size_bytes)
        for draw, count in document.pieces:
            start, end = end, end + count
            if drop:
                continue
            is_val = draw < journal.val_limit
            run.add(val if is_val else train, start, end, document.file_number)
            if not is_val and draw != ALWAYS_TRAIN:
                journal.record_draw(draw, count)
        journal.text_bytes += document.size_bytes
    run.write()
    journal.report.add_repaired(encoded.repaired)


class PieceRun:
    """Consecutive pieces of one split, which are written together."""

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens
        self._writer: ShardWriter | None = None
        self._starts: list[int] = []
        self._files: list[int] = []
        self._end = 0

    def add(self, writer: ShardWriter, start: int, end: int, file_number: int) -> None:
        if writer is not self._writer or start != self._end:
            self.write()
            self._writer, self._starts, self._files = writer, [], []
        self._starts.append(start)
        self._files.append(file_number)
        self._end = end

    def write(self) -> None:
        if self._writer is not None:
            starts = np.array([*self._starts, self._end], np.int64)
            self._writer.write_run(self._tokens[starts[0] : self._end], starts - starts[0], self._files)
            self._writer = None
