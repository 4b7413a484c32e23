"""Selects the checkpoint to load: the one asked for, or the newest valid one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint, T
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint, read_step
from gptmill.runs.checkpoints.tiers import BACKUP, BEST, LATEST, find_unlinked, read_tiers


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A loaded checkpoint, its path, and what is wrong with the newer ones that were rejected."""

    checkpoint: Checkpoint[T]
    path: Path
    complaints: list[str]


def has_checkpoints(folder: Path) -> bool:
    return bool(list_step_folders(folder))


def list_candidates(folder: Path, requested: str) -> list[Path]:
    """Returns the folders that `latest`, `best`, a name or a step may refer to, in order of preference."""
    folders, tiers = list_step_folders(folder), read_tiers(folder)
    newest_first = folders[::-1]
    if requested == "latest":
        # If latest is gone, latest_backup need not be the next best: the newest is.
        named = [tiers[tier] for tier in (LATEST, BACKUP) if tier in tiers] if LATEST in tiers else []
        return list(dict.fromkeys([*find_unlinked(folder), *named, *newest_first]))
    if requested == "best":
        return [tiers[BEST]] if BEST in tiers else []
    by_name = {**{path.name: path for path in folders}, **tiers}
    if requested in by_name:
        return [by_name[requested]]
    if re.fullmatch("[0-9]{1,19}", requested):
        of_step = [path for path in newest_first if read_step(path) == int(requested)]
        return sorted(of_step, key=lambda path: path not in tiers.values())
    raise UserError(
        f"{requested} is not a checkpoint of {folder.parent}; use latest, best or one of {_format_steps(folders)}"
    )


def load_chosen(folder: Path, requested: str, groups: tuple[str, ...]) -> Chosen[Tensor]:
    """Loads a checkpoint, or raises UserError if it is missing or damaged; `latest` falls back to older ones."""
    return try_candidates(
        folder, requested, find_candidates(folder, requested), lambda path: load_checkpoint(path, groups)
    )


def find_candidates(folder: Path, requested: str) -> list[Path]:
    """Returns at least one folder that may be what is requested; raises UserError if there is none."""
    candidates = list_candidates(folder, requested)
    if not candidates:
        raise UserError(_describe_absence(folder, requested))
    return candidates if requested == "latest" else candidates[:1]


def try_candidates(
    folder: Path, requested: str, candidates: list[Path], load: Callable[[Path], Checkpoint[T]]
) -> Chosen[T]:
    """Loads the first candidate that `load` accepts; raises UserError if there is none."""
    if requested != "latest":
        return Chosen(load(candidates[0]), candidates[0], [])
    complaints = [f"{folder / LATEST} links to no checkpoint"] if _has_lost_latest(folder) else []
    for path in candidates:
        try:
            return Chosen(load(path), path, complaints)
        except UserError as error:
            complaints.append(str(error))
    raise UserError("; ".join([*complaints, f"{folder} has no valid checkpoint to resume from; start a new run"]))


def _has_lost_latest(folder: Path) -> bool:
    """Whether there are tiers, but latest is missing or broken."""
    tiers = read_tiers(folder)
    return bool(tiers) and LATEST not in tiers


def _describe_absence(folder: Path, requested: str) -> str:
    folders = list_step_folders(folder)
    if not folders:
        return f"{folder} has no checkpoint to resume from; start a new run"
    what = "best_model (no validation loss was saved)" if requested == "best" else f"checkpoint of step {requested}"
    return f"{folder} has no {what}; use latest or a step: {_format_steps(folders)}"


def _format_steps(folders: list[Path]) -> str:
    return ", ".join(dict.fromkeys(str(read_step(path)) for path in folders)) or "none yet"
