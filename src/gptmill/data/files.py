"""File operations: checksums, atomic durable writes, locks between processes, and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
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

    A full disk leaves nothing else behind; where the file cannot be replaced, as a mount point, the new text is kept
    beside it. Raises UserError for a device or a pipe, which a rename would replace too.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file; choose another path")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        flush_to_disk(partial)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise
    try:
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; the new content is kept in {partial}", str(path)) from error
    flush_to_disk(path.parent)


@contextmanager
def stage(target: Path) -> Iterator[Path]:
    """Yields where to write a file or folder that then takes the place of `target` by a rename; a failure leaves none.

    What it replaces is deleted last, and what is complete is never deleted, even where it cannot be put in place.
    """
    partial, is_new = target.with_name(f".{target.name}.partial"), not os.path.lexists(target)
    try:
        remove_tree(partial)  # of a process that was killed
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
    except BaseException:
        remove_tree(partial)
        raise
    try:
        if is_new and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if target.is_dir():  # a rename does not replace a folder that holds files
            remove_tree(_find_replaced(target))
            target.rename(_find_replaced(target))
        partial.replace(target)
    except BaseException as error:
        restore_replaced(target)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"cannot write {target}: {error.strerror or error}; what was to be there is complete: move {partial} to "
            f"another place"
        ) from error
    flush_to_disk(target.parent)
    remove_tree(_find_replaced(target))


def restore_replaced(target: Path) -> None:
    """Renames back what `stage` was about to replace when it failed or was killed."""
    if (replaced := _find_replaced(target)).is_dir() and not os.path.lexists(target):
        replaced.rename(target)


def _find_replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def remove_tree(path: Path) -> None:
    """Deletes a file, a link or a folder, as far as it can."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


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
