"""One process at a time writes a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gptmill.config.errors import UserError
from gptmill.runs.directory import RunDirectory

try:
    import fcntl
except ImportError:  # Windows has no flock; runs there are not guarded
    fcntl = None  # type: ignore[assignment]


@contextmanager
def lock_run(run: RunDirectory) -> Iterator[None]:
    """Holds the run for as long as this process lives, however it ends; raises UserError if another one holds it."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = (run.path / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {run.path}: {error.strerror or error}; choose another --logdir") from None
    with lock as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"run {run.path} is being trained by another process; wait for it, or choose another --run_name"
                ) from None
            except OSError:
                pass  # a file system without locks
        yield
