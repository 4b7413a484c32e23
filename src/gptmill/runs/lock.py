"""One process at a time writes a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gptmill.config.errors import UserError
from gptmill.data.files import hold_lock
from gptmill.runs.directory import RunDirectory


@contextmanager
def lock_run(run: RunDirectory) -> Iterator[None]:
    """Holds the run for as long as this process lives, however it ends; raises UserError if another one holds it."""
    held = f"run {run.path} is being trained by another process; wait for it, or choose another --run_name"
    with ExitStack() as stack:
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(run.path / ".lock", held))
        except OSError as error:
            raise UserError(f"cannot write {run.path}: {error.strerror or error}; choose another --logdir") from None
        yield
