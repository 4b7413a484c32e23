"""Disk space for checkpoints: checked before training, and freed by deleting the least important checkpoints."""

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
    """Returns the free disk space for a folder, which need not exist yet. Does not know about quotas."""
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def check_disk_space(folder: Path, needed_bytes: int, keep: int) -> str:
    """Raises UserError if not even one checkpoint fits; returns a warning if `keep` of them do not, or ""."""
    free, deletable = free_bytes(folder) - MARGIN_BYTES, deletable_bytes(folder)
    if needed_bytes > free + deletable:
        raise UserError(
            f"a checkpoint takes {format_bytes(needed_bytes)} and logs {format_bytes(MARGIN_BYTES)}, but only "
            f"{format_bytes(free + MARGIN_BYTES + deletable)} are free in {folder}; free disk space or choose another "
            f"--logdir"
        )
    fitting = (free + deletable + _measure_latest(folder)) // max(1, needed_bytes)
    if fitting > keep:  # the new one is written before the oldest is deleted
        return ""
    return (
        f"{folder} has disk space for {fitting} checkpoints of {format_bytes(needed_bytes)}, but keep_checkpoints "
        f"{keep} needs {keep + 1}: the oldest will be deleted when the disk is full; free disk space"
    )


def deletable_bytes(folder: Path, in_use: InUse = lambda _: False) -> int:
    """Returns how much disk space could be freed."""
    return sum(_measure(path) for path in _list_deletable(folder) if not in_use(path))


def delete_oldest_rolling(folder: Path, in_use: InUse = lambda _: False) -> Path | None:
    """Deletes the oldest checkpoint that only rolling tiers or latest_backup link to, never that of latest.

    Returns what it deleted; None if there is nothing to delete, or if no valid checkpoint (all checksums verified)
    would remain.
    """
    oldest = next((path for path in _list_deletable(folder) if not in_use(path)), None)
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


def format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _list_deletable(folder: Path) -> list[Path]:
    """Returns the folders that may be deleted, the oldest first."""
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
        return 0  # deleted meanwhile
