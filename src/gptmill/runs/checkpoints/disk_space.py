"""Room on the disk for checkpoints: looked at before training, and made by dropping what matters least."""

from __future__ import annotations

import shutil
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.storage import delete_checkpoint, find_damage, list_step_folders
from gptmill.runs.checkpoints.tiers import (
    BACKUP,
    LATEST,
    ROLLING,
    InUse,
    find_unlinked,
    read_tiers,
    remove_tiers,
)

MARGIN_BYTES = 1_000_000  # for the logs, which share the disk


def free_bytes(folder: Path) -> int:
    """What this user may still write on the disk of a folder, which need not exist yet. Quotas are not seen."""
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def check_disk_space(folder: Path, needed_bytes: int, keep: int) -> str:
    """Raises UserError where not even one checkpoint fits; else a warning if `keep` of them will not, or ""."""
    free, droppable = free_bytes(folder) - MARGIN_BYTES, droppable_bytes(folder)
    if needed_bytes > free + droppable:
        raise UserError(
            f"a checkpoint takes {show_bytes(needed_bytes)} and logs {show_bytes(MARGIN_BYTES)}, but only "
            f"{show_bytes(free + MARGIN_BYTES + droppable)} are free at {folder}; make room there or choose another "
            f"--logdir"
        )
    fitting = (free + droppable + _measure_latest(folder)) // max(1, needed_bytes)
    if fitting > keep:  # the new one is written before the oldest goes
        return ""
    return (
        f"{folder} has room for {fitting} checkpoints of {show_bytes(needed_bytes)}, and keep_checkpoints {keep} needs "
        f"{keep + 1}: the oldest will be dropped when the disk is full; make room there"
    )


def droppable_bytes(folder: Path, in_use: InUse = lambda _: False) -> int:
    """How much room there is to be made."""
    return sum(_measure(path) for path in _list_droppable(folder) if not in_use(path))


def drop_oldest_rolling(folder: Path, in_use: InUse = lambda _: False) -> Path | None:
    """Deletes the oldest folder that at most rolling and latest_backup point to, and never latest's.

    Returns what it deleted; None if there is nothing to drop, or nothing that could do without it: a sound one, every
    byte of which is as it was saved, must remain.
    """
    oldest = next((path for path in _list_droppable(folder) if not in_use(path)), None)
    if oldest is None:
        return None
    latest = read_tiers(folder).get(LATEST)
    others = [path for path in reversed(list_step_folders(folder)) if path != oldest]
    others.sort(key=lambda path: path != latest)
    if all(find_damage(path, thorough=True) for path in others):
        return None
    delete_checkpoint(oldest)
    remove_tiers(folder, oldest)
    return oldest


def show_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _list_droppable(folder: Path) -> list[Path]:
    """Folders that may go, the oldest first."""
    folders, tiers = list_step_folders(folder), read_tiers(folder)
    held = {path for name, path in tiers.items() if name != BACKUP and not name.startswith(ROLLING)}
    held.update(find_unlinked(folder) if LATEST in tiers else folders[-1:])
    return [path for path in folders if path not in held]


def _measure_latest(folder: Path) -> int:
    latest = read_tiers(folder).get(LATEST)
    return 0 if latest is None else _measure(latest)


def _measure(path: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0  # gone meanwhile
