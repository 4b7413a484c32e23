"""One file as it is stored, opened for reading: local or remote, unpacked, and counted."""

from __future__ import annotations

import io
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gptmill.data.sources.compression import UnpackedFile, split_compression
from gptmill.data.sources.remote_files import open_remote
from gptmill.data.sources.source import SourceFile

BUFFER_BYTES = 2**20


class CountedFile(io.RawIOBase):
    """A file that counts what is read from it."""

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
    """What a format's reader is given. It opens the file in the way that the format needs."""

    def __init__(self, file: SourceFile) -> None:
        self.address = file.address
        self.size_bytes = file.size_bytes
        self._file = file
        _, self._compression = split_compression(file.path_name)
        self._counted: CountedFile | None = None
        self._bytes_done: int | None = None
        self._stack = ExitStack()

    @property
    def bytes_read(self) -> int:
        """Stored bytes consumed so far."""
        if self._bytes_done is not None:
            return self._bytes_done
        return self._counted.bytes_read if self._counted else 0

    @bytes_read.setter
    def bytes_read(self, count: int) -> None:
        """Of a reader that jumps, and so knows better than the count."""
        self._bytes_done = count

    @property
    def is_compressed(self) -> bool:
        return self._compression is not None

    @property
    def plain_path(self) -> Path | None:
        """Where the content itself lies on a local disk; None where it is remote or compressed."""
        return None if self._file.is_remote or self._compression else Path(self.address)

    def open_data(self) -> io.BufferedReader:
        """The content from its start, unpacked."""
        if self._file.is_remote:
            raw = self._stack.enter_context(open_remote(self.address))
        else:
            path = Path(self.address)
            raw = self._stack.enter_context(path.open("rb", buffering=0))
        self._counted = CountedFile(raw)
        if self._compression is None:
            return io.BufferedReader(self._counted, BUFFER_BYTES)
        return io.BufferedReader(UnpackedFile(self._counted, self._compression, self.address), BUFFER_BYTES)

    def open_seekable(self) -> Any:
        """The content as a file to jump in; what cannot be jumped in is copied to a temporary file first."""
        if self.plain_path is not None:
            return self._stack.enter_context(self.plain_path.open("rb"))
        if self._compression is None:
            remote = self._stack.enter_context(open_remote(self.address, to_jump_in=True))
            if remote.seekable():
                return remote
        spool = self._stack.enter_context(tempfile.TemporaryFile(prefix="gptmill-"))  # noqa: SIM115
        shutil.copyfileobj(self.open_data(), spool, BUFFER_BYTES)
        spool.seek(0)
        return spool

    def close(self) -> None:
        self._stack.close()
