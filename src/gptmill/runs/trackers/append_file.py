"""A file of lines that a full disk leaves no hole in."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptmill.data.files import flush_to_disk, write_durably

MAX_WAITING_BYTES = 16_000_000


class AppendedFile:
    """Lines, each on the disk when `write_line` returns; those that the disk refuses wait in memory for its next call.

    Nothing else may write to the file meanwhile. `durable` lines survive a power cut as well.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path = path
        self._is_durable = durable
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._begun_bytes = 0  # of the first waiting line, already in the file
        self._refused = ""
        self._lost_lines = 0

    def write_line(self, line: str) -> None:
        self._push(line.encode() + b"\n")
        self._write_waiting()

    def keep_only(self, is_kept: Callable[[str], bool]) -> None:
        """Drops all other lines, and one that was cut short; a disk that is full does not prevent it."""
        self._close_descriptor()
        waiting = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = self._begun_bytes = 0
        if self._path.exists():
            self._rewrite(is_kept)
        for line in waiting:
            if is_kept(_read(line)):
                self._push(line)
        self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        self._close_descriptor()
        if self._waiting:
            lost = len(self._waiting) + self._lost_lines
            _warn(f"{self._path} lacks its last {lost} lines: {self._refused}")
            self._waiting.clear()

    def _push(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 2:
            # The first may be half in the file, and its other half must follow.
            self._waiting_bytes -= len(self._waiting[1])
            del self._waiting[1]
            self._lost_lines += 1

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write_first()
            if self._is_durable and self._descriptor is not None:
                os.fsync(self._descriptor)
        except OSError as error:
            if not self._refused:
                _warn(f"{self._path}: {error.strerror or error}; its lines wait in memory until it can be written")
            self._refused = error.strerror or str(error)
            return
        if self._refused:
            lost = f", without {self._lost_lines} lines that were too many to wait" if self._lost_lines else ""
            _warn(f"{self._path} can be written again and is complete{lost}")
            self._refused, self._lost_lines = "", 0

    def _write_first(self) -> None:
        line = self._waiting[0]
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        while self._begun_bytes < len(line):
            self._begun_bytes += os.write(self._descriptor, line[self._begun_bytes :])
        self._waiting.popleft()
        self._waiting_bytes -= len(line)
        self._begun_bytes = 0

    def _rewrite(self, is_kept: Callable[[str], bool]) -> None:
        """Cuts off where that is enough; else replaces the file, or has its later lines wait where there is no room."""
        whole = self._path.read_bytes()
        lines = [line + b"\n" for line in whole.split(b"\n")[:-1]]
        kept = [is_kept(_read(line)) for line in lines]
        unbroken = kept.index(False) if False in kept else len(kept)
        later = [line for line, is_wanted in zip(lines[unbroken:], kept[unbroken:], strict=True) if is_wanted]
        if later:
            with suppress(OSError):
                write_durably(self._path, b"".join([*lines[:unbroken], *later]).decode(errors="replace"))
                return
            self._path.with_name(self._path.name + ".partial").unlink(missing_ok=True)
        length = sum(map(len, lines[:unbroken]))
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
    with suppress(OSError):  # the pipe may be gone
        sys.stderr.write(f"warning: {message}\n")
