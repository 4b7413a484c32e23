"""File operations: checksums, atomic durable writes, locks between processes, and the cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_regular

try:
    import fcntl
except ImportError:  # Windows has no flock, so there is no lock there
    fcntl = None  # type: ignore[assignment]


def find_cache_dir() -> Path:
    """Returns the folder for what can be downloaded or measured again: GPTMILL_CACHE, or gptmill in the user cache."""
    if named := os.environ.get("GPTMILL_CACHE"):
        return Path(named).expanduser().resolve()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().resolve() / "gptmill"


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file, read in blocks."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Atomically replaces a text file: after a kill or a power cut it has the old text or the new, never a part.

    A full disk leaves nothing else behind. Raises UserError for a device or a pipe, which a rename would replace too.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file; choose another path")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        flush_to_disk(partial)
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Calls fsync on a file, or on a folder, whose entries then survive a power cut."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, and makes its entries durable by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(path: Path, message: str) -> Iterator[None]:
    """Holds a file lock, which the system releases if the process dies; raises UserError(message) if it is taken."""
    with path.open("a", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(message) from None
            except OSError:
                pass  # the file system has no locks
        yield
