"""Tiers: names such as latest and best_model that link to a checkpoint, which is deleted once no tier does.

A tier is a relative symlink to a `step_*` folder beside it or, where the file system has no symlinks, a small text
file with the folder's name. Anything else with a tier's name is ignored. Of a checkpoint's content, only the losses
and the time of the save are known here.
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
EPOCH = "epoch_"
ABANDONED = "abandoned_step_"
TIER = re.compile(rf"{LATEST}|{BACKUP}|{BEST}|{EPOCH}[0-9]+|{ROLLING}[0-9]+|milestone_step_[0-9]+|{ABANDONED}[0-9]+")
MAX_POINTER_BYTES = 100

InUse = Callable[[Path], bool]


def make_rolling_name(step: int) -> str:
    return f"{ROLLING}{step:06d}"


def make_epoch_name(number: int) -> str:
    return f"{EPOCH}{number:05d}"


def make_milestone_name(step: int) -> str:
    return f"milestone_step_{step:06d}"


def make_abandoned_name(step: int) -> str:
    """Returns the tier of a checkpoint later than the one the user resumed from; kept until it is pruned."""
    return f"{ABANDONED}{step:06d}"


def find_tier_names(values: object) -> list[str]:
    """Returns the valid tier names in a checkpoint's values, which are untrusted: others could be paths to anywhere."""
    names = values if isinstance(values, list) else []
    return [name for name in names if isinstance(name, str) and TIER.fullmatch(name)]


def read_tiers(folder: Path) -> dict[str, Path]:
    """Returns the folder of each tier whose folder exists."""
    found = {name: folder / target for name, target in _read_links(folder).items()}
    return {name: path for name, path in found.items() if path.is_dir() and not path.is_symlink()}


def find_unlinked(folder: Path) -> list[Path]:
    """Returns the folders saved after latest that no tier links to, the newest first: a kill came before linking.

    Later in time, not in steps: after a rollback, abandoned checkpoints have higher steps.
    """
    tiers = read_tiers(folder)
    if LATEST not in tiers:
        return []
    # If latest cannot be read, its age is unknown, and all old folders would look newer.
    newest = max(_read_age(tiers[tier]) for tier in (LATEST, BACKUP) if tier in tiers)
    if newest[0] == -math.inf:
        return []
    unlinked = [(_read_age(path), path) for path in set(list_step_folders(folder)) - set(tiers.values())]
    return [path for age, path in sorted(unlinked, reverse=True) if age > newest]


def link_tier(folder: Path, tier: str, target: Path) -> None:
    """Links a tier to a folder, atomically."""
    assert TIER.fullmatch(tier), tier
    path, partial = folder / tier, folder / f".{tier}.partial"
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(target.name)
    except (OSError, NotImplementedError):
        partial.write_text(target.name + "\n", encoding="utf-8")
        flush_to_disk(partial)
    if path.is_dir() and not path.is_symlink():  # from a copy that followed the links; the user's to delete
        path.rename(next(aside for n in count(1) if not (aside := folder / f"{tier}.old_{n}").exists()))
    partial.replace(path)


def link_tiers(
    folder: Path, target: Path, tiers: Sequence[str], keep: int, in_use: InUse = lambda _: False
) -> list[Path]:
    """Makes a durable checkpoint the latest, links its tiers, and deletes the checkpoints that no tier links to.

    Checkpoints of the same or a later step were abandoned by a rollback and are deleted too. Returns the deleted
    folders; one that is `in_use` is deleted with a later save. If this is killed, `latest` or `find_unlinked` still
    finds the newest checkpoint.
    """
    _link_untiered(folder, target)
    before = read_tiers(folder)
    abandoned = [path for path in list_step_folders(folder) if path != target and read_step(path) >= read_step(target)]
    old = before.get(LATEST)
    if old is not None and old != target and old not in abandoned and not find_damage(old, thorough=False):
        link_tier(folder, BACKUP, old)
    link_tier(folder, LATEST, target)
    for tier in tiers:
        link_tier(folder, tier, target)
    _unlink_abandoned(folder, abandoned)
    _unlink_oldest(folder, ROLLING, keep)
    flush_to_disk(folder)
    linked = set(read_tiers(folder).values())
    return [path for path in list_step_folders(folder) if path not in linked and not in_use(path) and _delete(path)]


def prune(folder: Path, keep: int, keep_epochs: int | None = None) -> list[Path]:
    """Deletes abandoned checkpoints, those that no tier links to, and rolling ones beyond the newest `keep`.

    Of epochs, all are kept unless `keep_epochs` says how many. Returns the deleted folders. Raises UserError if the
    checkpoint that would remain as the latest is damaged.
    """
    folders = list_step_folders(folder)
    if not folders:
        return []
    unlinked = [path for path in find_unlinked(folder) if not find_damage(path, thorough=True)][:1]
    target = (unlinked or [read_tiers(folder).get(LATEST, folders[-1])])[0]
    if damage := find_damage(target, thorough=True):
        raise UserError(
            f"{damage}; nothing is deleted, since an older checkpoint may be the last valid one: resume with --resume "
            f"latest until the next save, then prune"
        )
    _unlink(folder, [name for name in read_tiers(folder) if name.startswith(ABANDONED)])
    if keep_epochs is not None:
        _unlink_oldest(folder, EPOCH, keep_epochs)
    return link_tiers(folder, target, [make_rolling_name(read_step(path)) for path in unlinked], keep)


def remove_tiers(folder: Path, target: Path) -> None:
    """Removes all tiers that link to a folder."""
    _unlink(folder, (name for name, linked in _read_links(folder).items() if linked == target.name))


def _read_links(folder: Path) -> dict[str, str]:
    """Returns the target name of each tier, existing or not. Links to elsewhere are ignored: they are untrusted."""
    links = {}
    for name in sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else ():
        if TIER.fullmatch(name) and STEP_FOLDER.fullmatch(target := _read_link(folder / name)):
            links[name] = target
    return links


def _read_link(path: Path) -> str:
    try:
        if path.is_symlink():
            return str(path.readlink())
        if path.is_file() and path.stat().st_size <= MAX_POINTER_BYTES:
            return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        pass  # deleted meanwhile, or not a link
    return ""


def _read_age(path: Path) -> tuple[float, int]:
    """Returns a sort key by the time of the save; a folder that cannot be read counts as the oldest."""
    try:
        return read_info(path).saved_at, read_step(path)
    except UserError:
        return -math.inf, read_step(path)


def _link_untiered(folder: Path, target: Path) -> None:
    """Links folders as rolling checkpoints if there is no tier at all: they were saved before any tier was linked."""
    if not _read_links(folder):
        older = [path for path in list_step_folders(folder) if path != target]
        for path in reversed(older):
            link_tier(folder, make_rolling_name(read_step(path)), path)
        if older:
            link_tier(folder, LATEST, older[-1])


def _unlink_abandoned(folder: Path, abandoned: list[Path]) -> None:
    """Removes tiers of abandoned or missing folders; best_model and latest_backup are linked to remaining ones."""
    lost = {name: folder / target for name, target in _read_links(folder).items()}
    lost = {
        name: path
        for name, path in lost.items()
        if not path.is_dir() or (path in abandoned and not name.startswith(ABANDONED))
    }
    remaining = {path for path in read_tiers(folder).values() if path not in abandoned}
    if BEST in lost and (best := find_best(remaining)):
        link_tier(folder, BEST, best)
        del lost[BEST]
    others = sorted(remaining - {read_tiers(folder)[LATEST]}, key=read_step)
    if BACKUP in lost and others:
        link_tier(folder, BACKUP, others[-1])
        del lost[BACKUP]
    _unlink(folder, lost)


def find_best(paths: Iterable[Path]) -> Path | None:
    """Returns the folder with the lowest validation loss; the earliest of several."""
    losses = []
    for path in paths:
        with suppress(UserError):
            if (loss := read_info(path).val_loss) is not None and math.isfinite(loss):
                losses.append((loss, read_step(path), path))
    return min(losses)[-1] if losses else None


def _unlink_oldest(folder: Path, kind: str, keep: int) -> None:
    linked = {name: path for name, path in read_tiers(folder).items() if name.startswith(kind)}
    oldest_first = sorted(linked, key=lambda name: read_step(linked[name]))
    _unlink(folder, oldest_first[: max(0, len(oldest_first) - keep)])


def _unlink(folder: Path, tiers: Iterable[str]) -> None:
    for tier in tiers:
        (folder / tier).unlink(missing_ok=True)


def _delete(path: Path) -> bool:
    try:
        delete_checkpoint(path)
    except OSError:
        return False  # deleted with a later save; the new checkpoint is durable regardless
    return True
