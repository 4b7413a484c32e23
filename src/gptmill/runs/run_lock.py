"""The lock on a run: one process at a time trains, prunes or removes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.directory import RunDirectory

try:
    import fcntl
except ImportError:  # Windows has no flock, so there is no lock there
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
POLL_SECONDS = 0.05
GLANCE_SECONDS = 0.3  # another process may be looking at the lock, in `is_locked`
STOPPING_SECONDS = 30.0  # how long a start waits for a process that saves and stops


@contextmanager
def lock_run(
    run: RunDirectory, wait_seconds: float = GLANCE_SECONDS, report_waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Locks the run until the context is left or this process dies; raises UserError if another process holds it.

    Leaves nothing behind: the file goes with the lock, and so do the folders made for it, if they are still empty.
    """
    made = [path for path in (run.path, *run.path.parents) if not os.path.lexists(path)]
    try:
        descriptor = _acquire(run, wait_seconds, report_waiting)
        try:
            yield
        finally:
            _release(descriptor, run.path / LOCK_NAME)
    finally:
        for folder in made:
            with suppress(OSError):  # no longer empty
                folder.rmdir()


def is_locked(run: RunDirectory) -> bool:
    """Whether a process holds the lock right now."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(run.path / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the file system has no locks
    finally:
        os.close(descriptor)
    return False


def _acquire(run: RunDirectory, wait_seconds: float, report_waiting: Callable[[], None]) -> int:
    started, has_reported = time.monotonic(), False
    while True:
        try:
            descriptor = _try_to_lock(run.path / LOCK_NAME)
        except OSError as error:
            raise UserError(f"cannot write {run.path}: {error.strerror or error}; choose another --logdir") from None
        if descriptor is not None:
            return descriptor
        waited = time.monotonic() - started
        if waited >= wait_seconds:
            raise UserError(
                f"run {run.path} is being trained by another process; wait for it, or choose another --run_name"
            )
        if waited > GLANCE_SECONDS and not has_reported:
            report_waiting()
            has_reported = True
        time.sleep(POLL_SECONDS)


def _try_to_lock(path: Path) -> int | None:
    """Returns the descriptor of the locked file; None if the lock is taken, or was given up in this very moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # the process before removed its empty folder in between
        return None
    except FileExistsError:
        if path.parent.exists() and not path.parent.is_dir():
            raise
        return None  # the folder was there, and gone when mkdir looked whether it is one
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        return descriptor  # the file system has no locks
    if _is_still_there(descriptor, path):
        return descriptor
    # The process before removed the file after it was opened here: a third one may lock a new file of this name.
    os.close(descriptor)
    return None


def _release(descriptor: int, path: Path) -> None:
    """Removes the file, then unlocks it: whoever waits for it notices that it is gone, and makes a new one."""
    try:
        with suppress(OSError):
            if _is_still_there(descriptor, path):
                path.unlink()
    finally:
        os.close(descriptor)


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
