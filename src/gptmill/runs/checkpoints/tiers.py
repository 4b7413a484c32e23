"""Tiers: names such as latest and best_model that point to a checkpoint's folder, and what goes when none does.

A tier is a relative link to a `step_*` folder beside it; where the file system has no links, a small text file that
holds the folder's name. Whatever else bears a tier's name is ignored. Knows nothing of what a checkpoint holds,
except its losses and when it was saved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk
from gptmill.runs.checkpoints.storage import (
    STEP_FOLDER,
    delete_checkpoint,
    find_damage,
    list_step_folders,
    read_info,
    read_step,
)

LATEST = "latest"
BACKUP = "latest_backup"
BEST = "best_model"
ROLLING = "rolling_step_"
ABANDONED = "abandoned_step_"
TIER = re.compile(rf"{LATEST}|{BACKUP}|{BEST}|epoch_[0-9]+|{ROLLING}[0-9]+|milestone_step_[0-9]+|{ABANDONED}[0-9]+")
MAX_POINTER_BYTES = 100

InUse = Callable[[Path], bool]


def make_rolling_name(step: int) -> str:
    return f"{ROLLING}{step:06d}"


def make_epoch_name(number: int) -> str:
    return f"epoch_{number:05d}"


def make_milestone_name(step: int) -> str:
    return f"milestone_step_{step:06d}"


def make_abandoned_name(step: int) -> str:
    """Of the checkpoint that a run was told to go back behind: kept until it is pruned."""
    return f"{ABANDONED}{step:06d}"


def find_tier_names(values: object) -> list[str]:
    """Those of a checkpoint's own words that name tiers; a stranger's others could lead anywhere."""
    names = values if isinstance(values, list) else []
    return [name for name in names if isinstance(name, str) and TIER.fullmatch(name)]


def read_tiers(folder: Path) -> dict[str, Path]:
    """Each tier's folder, for those tiers whose folder is there."""
    found = {name: folder / target for name, target in _read_pointers(folder).items()}
    return {name: path for name, path in found.items() if path.is_dir() and not path.is_symlink()}


def find_unlinked(folder: Path) -> list[Path]:
    """Folders saved after latest's that no tier points to, the newest first: a kill came before they were linked.

    Later in time, not in steps: after going back, the steps of the past that was given up are higher ones.
    """
    tiers = read_tiers(folder)
    if LATEST not in tiers:
        return []
    # A latest that cannot be read says nothing of its age: all that is old would look newer.
    newest = max(_read_age(tiers[tier]) for tier in (LATEST, BACKUP) if tier in tiers)
    if newest[0] == -math.inf:
        return []
    loose = [(_read_age(path), path) for path in set(list_step_folders(folder)) - set(tiers.values())]
    return [path for age, path in sorted(loose, reverse=True) if age > newest]


def point(folder: Path, tier: str, target: Path) -> None:
    """Makes a tier point to a folder: a reader or a kill finds the old target or the new one."""
    assert TIER.fullmatch(tier), tier
    path, fresh = folder / tier, folder / f".{tier}.partial"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target.name)
    except (OSError, NotImplementedError):
        fresh.write_text(target.name + "\n", encoding="utf-8")
        flush_to_disk(fresh)
    if path.is_dir() and not path.is_symlink():  # a copy that followed the links; it is the user's
        path.rename(next(aside for n in count(1) if not (aside := folder / f"{tier}.old_{n}").exists()))
    fresh.replace(path)


def link_tiers(
    folder: Path, target: Path, tiers: Sequence[str], keep: int, in_use: InUse = lambda _: False
) -> list[Path]:
    """Makes a durable checkpoint the latest, gives it its tiers, and deletes what then no tier holds.

    What was saved for the same or a later step is of a past that was given up, and goes. Returns the folders that
    are deleted; one that is `in_use` goes with a later save. Killed anywhere, it leaves `latest` or what
    `find_unlinked` finds newer than it.
    """
    _adopt(folder, target)
    before = read_tiers(folder)
    given_up = [path for path in list_step_folders(folder) if path != target and read_step(path) >= read_step(target)]
    old = before.get(LATEST)
    if old is not None and old != target and old not in given_up and not find_damage(old, thorough=False):
        point(folder, BACKUP, old)
    point(folder, LATEST, target)
    for tier in tiers:
        point(folder, tier, target)
    _leave_past(folder, given_up)
    _drop_rolling(folder, keep)
    flush_to_disk(folder)
    held = set(read_tiers(folder).values())
    return [path for path in list_step_folders(folder) if path not in held and not in_use(path) and _delete(path)]


def prune(folder: Path, keep: int) -> list[Path]:
    """Deletes what the run went back behind, what no tier holds, and rolling checkpoints beyond the newest `keep`.

    Returns what it deleted. Raises UserError where the checkpoint that would remain as the latest is damaged.
    """
    folders = list_step_folders(folder)
    if not folders:
        return []
    unlinked = [path for path in find_unlinked(folder) if not find_damage(path, thorough=True)][:1]
    target = (unlinked or [read_tiers(folder).get(LATEST, folders[-1])])[0]
    if damage := find_damage(target, thorough=True):
        raise UserError(
            f"{damage}; nothing is deleted, since an older checkpoint may be the last sound one: go on with --resume "
            f"latest until the next save, then prune"
        )
    _unlink(folder, [name for name in read_tiers(folder) if name.startswith(ABANDONED)])
    return link_tiers(folder, target, [make_rolling_name(read_step(path)) for path in unlinked], keep)


def remove_tiers(folder: Path, target: Path) -> None:
    """Removes all that points to a folder."""
    _unlink(folder, (name for name, pointed in _read_pointers(folder).items() if pointed == target.name))


def _read_pointers(folder: Path) -> dict[str, str]:
    """What each tier points to, there or not. Only plain names count: a stranger's link could lead anywhere."""
    pointers = {}
    for name in sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else ():
        if TIER.fullmatch(name) and STEP_FOLDER.fullmatch(pointed := _read_pointer(folder / name)):
            pointers[name] = pointed
    return pointers


def _read_pointer(path: Path) -> str:
    try:
        if path.is_symlink():
            return str(path.readlink())
        if path.is_file() and path.stat().st_size <= MAX_POINTER_BYTES:
            return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        pass  # gone meanwhile, or no pointer
    return ""


def _read_age(path: Path) -> tuple[float, int]:
    """Sorts folders by when they were saved; one that cannot be read counts as the oldest."""
    try:
        return read_info(path).saved_at, read_step(path)
    except UserError:
        return -math.inf, read_step(path)


def _adopt(folder: Path, target: Path) -> None:
    """Folders from before there were tiers, or from before the first one was linked, count as rolling checkpoints."""
    if not _read_pointers(folder):
        older = [path for path in list_step_folders(folder) if path != target]
        for path in reversed(older):
            point(folder, make_rolling_name(read_step(path)), path)
        if older:
            point(folder, LATEST, older[-1])


def _leave_past(folder: Path, given_up: list[Path]) -> None:
    """Removes tiers of folders that are given up or gone; best_model and latest_backup go to others that remain."""
    lost = {name: folder / pointed for name, pointed in _read_pointers(folder).items()}
    lost = {
        name: path
        for name, path in lost.items()
        if not path.is_dir() or (path in given_up and not name.startswith(ABANDONED))
    }
    remaining = {path for path in read_tiers(folder).values() if path not in given_up}
    if BEST in lost and (best := _find_best(remaining)):
        point(folder, BEST, best)
        del lost[BEST]
    others = sorted(remaining - {read_tiers(folder)[LATEST]}, key=read_step)
    if BACKUP in lost and others:
        point(folder, BACKUP, others[-1])
        del lost[BACKUP]
    _unlink(folder, lost)


def _find_best(paths: Iterable[Path]) -> Path | None:
    """The folder with the lowest validation loss; the earliest of them, since a loss stays until the next is known."""
    losses = []
    for path in paths:
        with suppress(UserError):
            if (loss := read_info(path).val_loss) is not None and math.isfinite(loss):
                losses.append((loss, read_step(path), path))
    return min(losses)[-1] if losses else None


def _drop_rolling(folder: Path, keep: int) -> None:
    rolling = {name: path for name, path in read_tiers(folder).items() if name.startswith(ROLLING)}
    oldest_first = sorted(rolling, key=lambda name: read_step(rolling[name]))
    _unlink(folder, oldest_first[: max(0, len(oldest_first) - keep)])


def _unlink(folder: Path, tiers: Iterable[str]) -> None:
    for tier in tiers:
        (folder / tier).unlink(missing_ok=True)


def _delete(path: Path) -> bool:
    try:
        delete_checkpoint(path)
    except OSError:
        return False  # it goes with a later save; the new checkpoint is durable all the same
    return True
