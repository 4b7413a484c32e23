"""A fingerprint of the source code that trains a run, more precise than the version."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import gptmill


@cache  # files that change later are not what this process runs
def make_code_fingerprint() -> str:
    """Returns the first 12 hex digits of a SHA-256 over gptmill's source files and their names."""
    folder = Path(gptmill.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
