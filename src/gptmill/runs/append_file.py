"""An append-only text file that loses no line to a full disk or to errors that pass."""

from __future__ import annotations

import errno
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from gptmill.config.regular_files import IrregularFileError, open_regular
from gptmill.data.files import flush_to_disk, write_durably

MAX_PENDING_BYTES = 16_000_000
RETRY_SECONDS = (0.02, 0.1, 0.3, 1.0)  # pauses between the attempts where the caller has to wait
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)  # a pipe fails and nobody waits for it
FULL = (errno.ENOSPC, errno.EDQUOT)  # waiting a second does not help

Result = TypeVar("Result")


class Extent(NamedTuple):
    """The beginning of a file: its length and CRC-32. Enough against damage; forged lines are not looked for."""

    length: int
    crc: int

    def extend(self, content: bytes | memoryview) -> Extent:
        return Extent(self.length + len(content), zlib.crc32(content, self.crc))


class AppendOnlyFile:
    """Writes each line before `write_line` returns; lines that the disk refuses are kept in memory and retried.

    Nothing else may write to the file meanwhile. `durable` lines are flushed to disk and survive a power failure.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path = path
        self._is_durable = durable
        self._descriptor: int | None = None
        self._length: int | None = None  # of the file as far as it is known to be right; None before the first write
        self.extent = Extent(0, 0)
        """What `keep_only` left, and what was written since."""
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._written_bytes = 0  # of the first pending line
        self._is_unflushed = False  # durable lines were written since the last fsync
        self._failure = ""
        self._is_full = False
        self._lost_lines = 0

    def write_line(self, line: str) -> None:
        self._push(line.encode() + b"\n")
        self._write_pending()

    def keep_only(self, is_kept: Callable[[str], bool]) -> None:
        """Drops all other lines, and an incomplete last line; works on a full disk too."""
        self._close_descriptor()
        self._length = None
        pending = list(self._pending)
        self._pending.clear()
        self._pending_bytes = self._written_bytes = 0
        self.extent = Extent(0, 0)
        if self._path.exists():
            self._rewrite(is_kept)
        for line in pending:
            if is_kept(_read(line)):
                self._push(line)
        self._write_pending()

    def close(self) -> None:
        """Writes what is still pending, in a few attempts; says what is lost."""
        self._write_pending()
        for seconds in RETRY_SECONDS:
            if not self._failure or self._is_full:
                break
            time.sleep(seconds)
            self._write_pending()
        self._close_descriptor()
        if self._pending:
            lost = len(self._pending) + self._lost_lines
            _warn(f"{self._path} lacks its last {'line' if lost == 1 else f'{lost} lines'}: {self._failure}")
            self._pending.clear()

    def _push(self, line: bytes) -> None:
        self._pending.append(line)
        self._pending_bytes += len(line)
        self._is_unflushed = self._is_durable
        while self._pending_bytes > MAX_PENDING_BYTES and len(self._pending) > 2:
            # The first line may be partly written; the rest of it must follow.
            self._pending_bytes -= len(self._pending[1])
            del self._pending[1]
            self._lost_lines += 1

    def _write_pending(self) -> None:
        try:
            try:
                self._try_to_write()
            except OSError as error:
                if self._failure or error.errno in FULL:
                    raise
                self._try_to_write()  # most errors have passed by now, and nobody needs to know
        except OSError as error:
            if not self._failure:
                _warn(f"{self._path}: {error.strerror or error}; its lines are kept in memory until it can be written")
            self._failure, self._is_full = error.strerror or str(error), error.errno in FULL
            return
        if self._failure:
            lost = f", except for {self._lost_lines} lines that did not fit in memory" if self._lost_lines else ""
            _warn(f"{self._path} can be written again and is complete{lost}")
            self._failure, self._lost_lines = "", 0

    def _try_to_write(self) -> None:
        try:
            descriptor = self._open() if self._pending or self._is_unflushed else None
            while self._pending and descriptor is not None:
                self._write_first(descriptor)
            if self._is_unflushed and descriptor is not None:
                os.fsync(descriptor)
            self._is_unflushed = False
        except OSError:
            self._close_descriptor()  # another attempt may need another one, as with a stale NFS file handle
            raise

    def _open(self) -> int:
        """Returns the descriptor; cuts off what a write left behind before it failed, and which is written again."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, FLAGS, 0o666)
            length = os.fstat(self._descriptor).st_size
            if self._length is not None and length > self._length:
                os.ftruncate(self._descriptor, self._length)
            else:
                self._length = length
        return self._descriptor

    def _write_first(self, descriptor: int) -> None:
        assert self._length is not None
        line = self._pending[0]
        while self._written_bytes < len(line):
            written = os.write(descriptor, line[self._written_bytes :])
            self.extent = self.extent.extend(line[self._written_bytes : self._written_bytes + written])
            self._written_bytes += written
            self._length += written
        self._pending.popleft()
        self._pending_bytes -= len(line)
        self._written_bytes = 0

    def _rewrite(self, is_kept: Callable[[str], bool]) -> None:
        """Truncates the file if that is enough, else replaces it; on a full disk, the later lines stay pending."""
        whole = _retry(lambda: _read_whole(self._path))
        lines = [line + b"\n" for line in whole.split(b"\n")[:-1]]
        kept = [is_kept(_read(line)) for line in lines]
        prefix = kept.index(False) if False in kept else len(kept)
        later = [line for line, is_wanted in zip(lines[prefix:], kept[prefix:], strict=True) if is_wanted]
        if later:
            text = b"".join([*lines[:prefix], *later]).decode(errors="replace")
            with suppress(OSError):
                _retry(lambda: write_durably(self._path, text))
                self.extent = self.extent.extend(text.encode())
                return
            self._path.with_name(self._path.name + ".partial").unlink(missing_ok=True)
        length = sum(map(len, lines[:prefix]))
        if length < len(whole):
            _retry(lambda: os.truncate(self._path, length))
            _retry(lambda: flush_to_disk(self._path))
        self.extent = self.extent.extend(memoryview(whole)[:length])
        for line in later:
            self._push(line)

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _retry(action: Callable[[], Result]) -> Result:
    for seconds in RETRY_SECONDS:
        try:
            return action()
        except OSError as error:
            if error.errno in FULL or isinstance(error, IrregularFileError):
                raise
            time.sleep(seconds)
    return action()


def _read_whole(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _read(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\n")


def _warn(message: str) -> None:
    with suppress(OSError):  # stderr may be a closed pipe
        sys.stderr.write(f"warning: {message}\n")
