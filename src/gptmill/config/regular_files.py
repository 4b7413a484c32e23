"""Opens files that a stranger may have supplied: regular files only, since a pipe blocks and a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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
# Without waiting for the writer of a pipe that replaced the file since it was checked.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
MAX_BYTES = 1 << 30  # of a file that is read whole


class IrregularFileError(OSError):
    """There is something else in place of a regular file."""

    def __init__(self, path: Path, mode: int) -> None:
        self.kind = KINDS.get(stat.S_IFMT(mode), "a special file")
        super().__init__(errno.EINVAL, f"it is {self.kind}, not a regular file", str(path))


def measure_regular(path: Path, *, follow_links: bool = True) -> int:
    """Returns the size of a regular file in bytes; raises OSError for anything else."""
    return _check_kind(path, path.stat(follow_symlinks=follow_links))


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Opens a regular file; raises OSError for anything else."""
    measure_regular(path, follow_links=follow_links)  # merely opening a device can have side effects
    file = os.fdopen(os.open(path, FLAGS | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))), "rb")
    try:
        _check_kind(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file; raises OSError for anything else, or a file that is larger."""
    with open_regular(path) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes
        content = b"" if is_larger else file.read(max_bytes + 1)  # the files of /proc have no size
    if is_larger or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def measure_untrusted(path: Path) -> int:
    """Returns the size of a regular file of a checkpoint; raises UserError for anything else, even a link to one."""
    with _report_errors(path):
        return measure_regular(path, follow_links=False)


def open_untrusted(path: Path) -> BufferedReader:
    """Opens a regular file of a checkpoint; raises UserError for anything else, even a link to one."""
    with _report_errors(path):
        return open_regular(path, follow_links=False)


def _check_kind(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFileError(path, status.st_mode)
    return status.st_size


@contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except IrregularFileError as error:
        raise UserError(
            f"{path} is {error.kind}, where a checkpoint has regular files; use another checkpoint"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
