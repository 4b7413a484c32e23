"""Which code a run was trained by: its own files, whatever the version says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gptmill


def make_code_fingerprint() -> str:
    """The first digits of a checksum over gptmill's source files and their names."""
    folder = Path(gptmill.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
