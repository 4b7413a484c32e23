"""Opens files of untrusted checkpoints: regular files only, and never through a link."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from gptmill.config.errors import UserError

KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# Opening a pipe would block until it has a writer; a link could have replaced the file since it was checked.
FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def measure_regular(path: Path) -> int:
    """Returns the size of a regular file in bytes; raises UserError for anything else."""
    try:
        status = path.lstat()
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
    return _check_kind(path, status)


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file; raises UserError for anything else."""
    measure_regular(path)  # merely opening a device can have side effects
    try:
        file = os.fdopen(os.open(path, FLAGS), "rb")
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
    try:
        _check_kind(path, os.fstat(file.fileno()))
    except UserError:
        file.close()
        raise
    return file


def _check_kind(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise UserError(f"{path} is {kind}, where a checkpoint has regular files; use another checkpoint")
    return status.st_size
