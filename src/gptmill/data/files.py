"""Files as bytes: checksums, durable writes, locks between processes, and where the cache is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptmill.config.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no flock; nothing is guarded there
    fcntl = None  # type: ignore[assignment]


def find_cache_dir() -> Path:
    """Where gptmill keeps what it can fetch or measure again: GPTMILL_CACHE, or gptmill in the user's cache."""
    if named := os.environ.get("GPTMILL_CACHE"):
        return Path(named).expanduser().resolve()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().resolve() / "gptmill"


def hash_file(path: Path) -> str:
    """The file's SHA-256, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Replaces a text file: a reader, a kill or a power cut finds the old text or the new one, never a piece."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    flush_to_disk(partial)
    partial.replace(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Makes a file's bytes, or a folder's list of names, survive a power cut."""
    if path.is_dir() and os.name == "nt":
        return  # Windows keeps a folder's names durable by itself and cannot open one
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(path: Path, complaint: str) -> Iterator[None]:
    """Holds the file for as long as this process lives, however it ends; raises UserError if another one holds it."""
    with path.open("a", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(complaint) from None
            except OSError:
                pass  # a file system without locks
        yield
