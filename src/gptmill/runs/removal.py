"""Removes runs: all of a run or nothing, and nothing outside the log directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from gptmill.config.errors import UserError, suggest
from gptmill.runs.directory import RunDirectory, list_folders
from gptmill.runs.run_lock import is_locked, lock_run

SUFFIX = ".deleted"


def find_removable(name: str, logdir: str) -> RunDirectory:
    """Returns the run of this name, or with this path in the log directory; raises UserError if it must stay."""
    folder, given = Path(logdir), Path(name)
    if not given.name or given.name == ".." or (given.name != name and not _is_in(given, folder)):
        raise UserError(f"{name} is not in {logdir}/; give the name of a run in it, or another --logdir")
    run = RunDirectory(folder / given.name)
    if run.path.is_symlink():
        raise UserError(f"{run.path} is a link to {run.path.readlink()}; remove the link yourself, or that folder")
    if given.name.startswith(".") or not run.has_files:
        near = suggest(given.name, [other.path.name for other in list_folders(logdir)])
        raise UserError(f"there is no run {name!r} in {logdir}/{near}; gptmill runs list shows them all")
    if is_locked(run):
        raise UserError(f"run {run.path} is being trained by another process; stop it first")
    return run


def remove_run(run: RunDirectory) -> None:
    """Renames the run's folder, then deletes it: a kill in between leaves no half of a run.

    Links in it are removed, and what they lead to stays. Raises UserError if another process trains the run.
    """
    for leftover in run.path.parent.glob(f".*{SUFFIX}"):  # of an earlier removal that was killed
        _delete(leftover)
    hidden = run.path.with_name(f".{run.path.name}{SUFFIX}")
    with lock_run(run):
        run.path.rename(hidden)
    _delete(hidden)


def _delete(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)  # does not follow links


def _is_in(path: Path, folder: Path) -> bool:
    return path.absolute().parent.resolve() == folder.resolve()
