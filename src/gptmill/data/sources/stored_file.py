"""Opens one file for reading, local or remote: decompresses it and counts the stored bytes consumed."""

from __future__ import annotations

import io
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gptmill.data.sources.compression import DecompressedFile, split_compression
from gptmill.data.sources.remote_files import open_remote
from gptmill.data.sources.source import SourceFile

BUFFER_BYTES = 2**20


class CountingFile(io.RawIOBase):
    """A file that counts the bytes read from it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self._file.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        return len(data)


class StoredFile:
    """The input of a format reader, which opens it as a stream or for random access."""

    def __init__(self, file: SourceFile, max_expansion: float | None) -> None:
        self.uri = file.uri
        self.size_bytes = file.size_bytes
        self._max_expansion = max_expansion
        self._file = file
        _, self._compression = split_compression(file.path_name)
        self._counting: CountingFile | None = None
        self._bytes_done: int | None = None
        self._stack = ExitStack()

    @property
    def bytes_read(self) -> int:
        """Stored bytes consumed so far."""
        if self._bytes_done is not None:
            return self._bytes_done
        return self._counting.bytes_read if self._counting else 0

    @bytes_read.setter
    def bytes_read(self, count: int) -> None:
        """Overrides the count, for readers with random access."""
        self._bytes_done = count

    @property
    def is_compressed(self) -> bool:
        return self._compression is not None

    @property
    def plain_path(self) -> Path | None:
        """The local path of the content; None if the file is remote or compressed."""
        return None if self._file.is_remote or self._compression else Path(self.uri)

    def open_data(self) -> io.BufferedReader:
        """Opens the decompressed content as a stream from its start."""
        if self._file.is_remote:
            raw = self._stack.enter_context(open_remote(self.uri))
        else:
            path = Path(self.uri)
            raw = self._stack.enter_context(path.open("rb", buffering=0))
        self._counting = CountingFile(raw)
        if self._compression is None:
            return io.BufferedReader(self._counting, BUFFER_BYTES)
        content = DecompressedFile(self._counting, self._compression, self.uri, self._max_expansion)
        return io.BufferedReader(content, BUFFER_BYTES)

    def open_seekable(self) -> Any:
        """Opens the content for random access; copies it to a temporary file first if it is not seekable."""
        if self.plain_path is not None:
            return self._stack.enter_context(self.plain_path.open("rb"))
        if self._compression is None:
            remote = self._stack.enter_context(open_remote(self.uri, to_jump_in=True))
            if remote.seekable():
                return remote
        spool = self._stack.enter_context(tempfile.TemporaryFile(prefix="gptmill-"))  # noqa: SIM115
        shutil.copyfileobj(self.open_data(), spool, BUFFER_BYTES)
        spool.seek(0)
        return spool

    def close(self) -> None:
        self._stack.close()
