"""An append-only text file that loses no line when the disk is full."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptmill.data.files import flush_to_disk, write_durably

MAX_PENDING_BYTES = 16_000_000


class AppendOnlyFile:
    """Writes each line before `write_line` returns; lines that the disk refuses are kept in memory and retried.

    Nothing else may write to the file meanwhile. `durable` lines are flushed to disk and survive a power failure.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path = path
        self._is_durable = durable
        self._descriptor: int | None = None
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._written_bytes = 0  # of the first pending line
        self._failure = ""
        self._lost_lines = 0

    def write_line(self, line: str) -> None:
        self._push(line.encode() + b"\n")
        self._write_pending()

    def keep_only(self, is_kept: Callable[[str], bool]) -> None:
        """Drops all other lines, and an incomplete last line; works on a full disk too."""
        self._close_descriptor()
        pending = list(self._pending)
        self._pending.clear()
        self._pending_bytes = self._written_bytes = 0
        if self._path.exists():
            self._rewrite(is_kept)
        for line in pending:
            if is_kept(_read(line)):
                self._push(line)
        self._write_pending()

    def close(self) -> None:
        self._write_pending()
        self._close_descriptor()
        if self._pending:
            lost = len(self._pending) + self._lost_lines
            _warn(f"{self._path} lacks its last {lost} lines: {self._failure}")
            self._pending.clear()

    def _push(self, line: bytes) -> None:
        self._pending.append(line)
        self._pending_bytes += len(line)
        while self._pending_bytes > MAX_PENDING_BYTES and len(self._pending) > 2:
            # The first line may be partly written; the rest of it must follow.
            self._pending_bytes -= len(self._pending[1])
            del self._pending[1]
            self._lost_lines += 1

    def _write_pending(self) -> None:
        try:
            while self._pending:
                self._write_first()
            if self._is_durable and self._descriptor is not None:
                os.fsync(self._descriptor)
        except OSError as error:
            if not self._failure:
                _warn(f"{self._path}: {error.strerror or error}; its lines are kept in memory until it can be written")
            self._failure = error.strerror or str(error)
            return
        if self._failure:
            lost = f", except for {self._lost_lines} lines that did not fit in memory" if self._lost_lines else ""
            _warn(f"{self._path} can be written again and is complete{lost}")
            self._failure, self._lost_lines = "", 0

    def _write_first(self) -> None:
        line = self._pending[0]
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        while self._written_bytes < len(line):
            self._written_bytes += os.write(self._descriptor, line[self._written_bytes :])
        self._pending.popleft()
        self._pending_bytes -= len(line)
        self._written_bytes = 0

    def _rewrite(self, is_kept: Callable[[str], bool]) -> None:
        """Truncates the file if that is enough, else replaces it; on a full disk, the later lines stay pending."""
        whole = self._path.read_bytes()
        lines = [line + b"\n" for line in whole.split(b"\n")[:-1]]
        kept = [is_kept(_read(line)) for line in lines]
        prefix = kept.index(False) if False in kept else len(kept)
        later = [line for line, is_wanted in zip(lines[prefix:], kept[prefix:], strict=True) if is_wanted]
        if later:
            with suppress(OSError):
                write_durably(self._path, b"".join([*lines[:prefix], *later]).decode(errors="replace"))
                return
            self._path.with_name(self._path.name + ".partial").unlink(missing_ok=True)
        length = sum(map(len, lines[:prefix]))
        if length < len(whole):
            os.truncate(self._path, length)
            flush_to_disk(self._path)
        for line in later:
            self._push(line)

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\n")


def _warn(message: str) -> None:
    with suppress(OSError):  # stderr may be a closed pipe
        sys.stderr.write(f"warning: {message}\n")
