"""Files as bytes: checksums, and making writes durable."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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
