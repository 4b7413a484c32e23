"""Probes of the folder that runs are written to. In a child process, since a network file system may not answer."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from gptmill.data.files import flush_to_disk

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

WRITTEN_BYTES = 32 << 20
BLOCK = os.urandom(1 << 20)  # a file system may compress


def measure_folder(logdir: str) -> dict[str, Any]:
    """Writes a file, renames, locks and links it, in the folder or its nearest parent that exists, and deletes it all.

    Raises OSError where that is not possible.
    """
    folder = find_existing(Path(logdir))
    with tempfile.TemporaryDirectory(prefix=".gptmill-doctor-", dir=folder) as name:
        inside = Path(name)
        free = shutil.disk_usage(inside).free
        seconds = _write(inside / "partial", min(WRITTEN_BYTES, free // 4))
        (inside / "partial").replace(inside / "whole")
        flush_to_disk(inside)
        skew = (inside / "whole").stat().st_mtime - time.time()
        return {
            "folder": str(folder),
            "free": free,
            "bytes_per_second": min(WRITTEN_BYTES, free // 4) / seconds,
            "file_system": find_file_system(folder),
            "has_locks": _can_lock(inside / "whole"),
            "has_links": _can_link(inside),
            "skew_seconds": skew,
        }


def find_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    absolute = folder.expanduser().absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def find_file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system, such as ext4 or nfs4; empty where the system does not list it."""
    best, found = "", ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    path = str(folder.resolve())
    for line in filter(None, lines):
        _, mounted, kind, *_ = line.split(" ")
        is_parent = path == mounted or path.startswith(mounted.rstrip("/") + "/")
        if is_parent and len(mounted) >= len(best):
            best, found = mounted, kind
    return found


def _write(path: Path, size: int) -> float:
    """Seconds to write and flush so many bytes."""
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, size, len(BLOCK)):
            file.write(BLOCK[: size - start])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _can_lock(path: Path) -> bool:
    if fcntl is None:
        return False
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _can_link(folder: Path) -> bool:
    try:
        (folder / "link").symlink_to("whole")
    except OSError:
        return False
    return True
