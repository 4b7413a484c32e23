"""Which checkpoint a run goes on from: the one asked for, or the newest that is sound."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint, read_step
from gptmill.runs.checkpoints.tiers import BACKUP, BEST, LATEST, find_unlinked, read_tiers


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that was loaded, where it lies, and what is wrong with those passed over."""

    checkpoint: Checkpoint
    path: Path
    complaints: list[str]


def has_checkpoints(folder: Path) -> bool:
    return bool(list_step_folders(folder))


def list_candidates(folder: Path, wanted: str) -> list[Path]:
    """The folders that `latest`, `best`, a name or a step's number may mean, the likeliest first; each once."""
    folders, tiers = list_step_folders(folder), read_tiers(folder)
    newest_first = folders[::-1]
    if wanted == "latest":
        # Without latest, latest_backup need not be next: the newest is.
        named = [tiers[tier] for tier in (LATEST, BACKUP) if tier in tiers] if LATEST in tiers else []
        return list(dict.fromkeys([*find_unlinked(folder), *named, *newest_first]))
    if wanted == "best":
        return [tiers[BEST]] if BEST in tiers else []
    by_name = {**{path.name: path for path in folders}, **tiers}
    if wanted in by_name:
        return [by_name[wanted]]
    if re.fullmatch("[0-9]{1,19}", wanted):
        of_step = [path for path in newest_first if read_step(path) == int(wanted)]
        return sorted(of_step, key=lambda path: path not in tiers.values())
    raise UserError(
        f"{wanted} is no checkpoint of {folder.parent}; write latest, best or one of {_name_steps(folders)}"
    )


def load_chosen(folder: Path, wanted: str, groups: tuple[str, ...]) -> Chosen:
    """Loads what is wanted, whole and sound, or raises UserError; `latest` falls back to older checkpoints."""
    candidates = list_candidates(folder, wanted)
    if not candidates:
        raise UserError(_describe_absence(folder, wanted))
    if wanted != "latest":
        return Chosen(load_checkpoint(candidates[0], groups), candidates[0], [])
    complaints = [f"{folder / LATEST} points to no checkpoint"] if _has_lost_latest(folder) else []
    for path in candidates:
        try:
            return Chosen(load_checkpoint(path, groups), path, complaints)
        except UserError as error:
            complaints.append(str(error))
    raise UserError("; ".join([*complaints, f"{folder} holds no sound checkpoint to go on from; start a new run"]))


def _has_lost_latest(folder: Path) -> bool:
    """Whether there are tiers, and latest is gone or leads nowhere."""
    tiers = read_tiers(folder)
    return bool(tiers) and LATEST not in tiers


def _describe_absence(folder: Path, wanted: str) -> str:
    folders = list_step_folders(folder)
    if not folders:
        return f"{folder} holds no checkpoint to go on from; start a new run"
    what = "best_model (no validation loss was saved)" if wanted == "best" else f"checkpoint of step {wanted}"
    return f"{folder} holds no {what}; write latest or a step: {_name_steps(folders)}"


def _name_steps(folders: list[Path]) -> str:
    return ", ".join(dict.fromkeys(str(read_step(path)) for path in folders)) or "there is none yet"
