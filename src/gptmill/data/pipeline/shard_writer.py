"""Writes the shard files of one split. Files are append-only, so that they can be truncated to an earlier state."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk, hash_file
from gptmill.data.shards.shard_manifest import DOCUMENTS_DIR, ORIGINS_DIR, Shard, Split
from gptmill.data.tokenizers.protocol import TokenArray

HEADER_BYTES = 128


class GrowingArray:
    """A one-dimensional `.npy` file that is appended to. Its header is correct after each flush."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        """Opens the file to append after its first `length` elements; truncates the rest."""
        self.path = path
        self.length = length
        self._dtype = dtype
        self._file: BinaryIO = path.open("r+b" if length else "w+b")
        if length and self._file.seek(0, io.SEEK_END) < HEADER_BYTES + length * dtype.itemsize:
            self._file.close()
            advice = "remove the folder that ends in .partial and run the same command again"
            raise UserError(f"{path} is shorter than its journal says; {advice}")
        self._file.truncate(HEADER_BYTES + length * dtype.itemsize)
        self._file.seek(0, io.SEEK_END)

    def append(self, values: NDArray[Any]) -> None:
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self.length += len(values)

    def flush(self) -> None:
        """Writes the header and makes everything written so far durable."""
        header = io.BytesIO()
        description = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        np.lib.format.write_array_header_1_0(header, description)
        assert len(header.getvalue()) == HEADER_BYTES
        self._file.seek(0)
        self._file.write(header.getvalue())
        self._file.seek(0, io.SEEK_END)
        self._file.flush()
        flush_to_disk(self.path)

    def close(self) -> None:
        self._file.close()


@dataclass
class WriterState:
    """How much of a split is written: its finished shards, and the contents of the open one."""

    documents: int = 0
    tokens: int = 0
    shards: list[Shard] = field(default_factory=list)
    open_tokens: int = 0
    open_documents: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def make_split(self) -> Split:
        return Split(self.documents, self.tokens, tuple(self.shards))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> WriterState:
        return cls(**{**content, "shards": [Shard(**shard) for shard in content["shards"]]})


class ShardWriter:
    """Packs documents into shards of a fixed number of tokens."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: WriterState) -> None:
        self.state = state
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._open_shard()

    def write_run(self, tokens: TokenArray, bounds: NDArray[np.int64], file_numbers: list[int]) -> None:
        """Writes consecutive documents; `bounds` has the start of each in `tokens` and the end of the last."""
        state, count = self.state, len(file_numbers)
        if state.open_tokens + len(tokens) >= self._shard_tokens:
            for number, file_number in enumerate(file_numbers):
                self.write(tokens[bounds[number] : bounds[number + 1]], file_number)
            return
        self._starts.append(bounds[:-1] + state.open_tokens)
        self._origins.append(np.array(file_numbers, np.uint32))
        self._tokens.append(tokens)
        state.documents += count
        state.open_documents += count
        state.tokens += len(tokens)
        state.open_tokens += len(tokens)

    def write(self, tokens: TokenArray, file_number: int) -> None:
        """Writes one document."""
        state = self.state
        self._starts.append(np.array([state.open_tokens], np.int64))
        self._origins.append(np.array([file_number], np.uint32))
        state.documents += 1
        state.open_documents += 1
        state.tokens += len(tokens)
        while len(tokens):
            capacity = self._shard_tokens - state.open_tokens
            self._tokens.append(tokens[:capacity])
            state.open_tokens += len(tokens[:capacity])
            tokens = tokens[capacity:]
            if state.open_tokens == self._shard_tokens:
                self._finish_shard()
                self._open_shard()

    def flush(self) -> None:
        """Makes everything written so far durable."""
        for array in self._arrays:
            array.flush()

    def finish(self) -> None:
        """Closes the last shard, or deletes it if it is empty."""
        if self.state.open_tokens:
            self._finish_shard()
        else:
            self.close()
            for array in self._arrays:
                array.path.unlink()

    def close(self) -> None:
        for array in self._arrays:
            array.close()

    def _open_shard(self) -> None:
        name, state = f"{self._split}_{len(self.state.shards):06d}.npy", self.state
        self._tokens = GrowingArray(self._folder / name, self._dtype, state.open_tokens)
        self._starts = GrowingArray(self._folder / DOCUMENTS_DIR / name, np.dtype(np.int64), state.open_documents)
        self._origins = GrowingArray(self._folder / ORIGINS_DIR / name, np.dtype(np.uint32), state.open_documents)
        self._arrays = (self._tokens, self._starts, self._origins)

    def _finish_shard(self) -> None:
        self.flush()
        self.close()
        state = self.state
        tokens, starts, origins = (hash_file(array.path) for array in self._arrays)
        state.shards.append(
            Shard(self._tokens.path.name, state.open_tokens, tokens, state.open_documents, starts, origins)
        )
        state.open_tokens = state.open_documents = 0
