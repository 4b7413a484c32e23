"""Removes single checkpoints of a run. Which tiers they have is known here; who trains the run is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk
from gptmill.runs.checkpoints.selection import list_candidates
from gptmill.runs.checkpoints.storage import delete_checkpoint, find_damage, list_step_folders
from gptmill.runs.checkpoints.tiers import BACKUP, BEST, LATEST, find_best, link_tier, read_tiers, remove_tiers


def check_removable(folder: Path, targets: Sequence[Path]) -> None:
    """Raises UserError for a checkpoint that the run cannot spare: its latest, best or last complete one."""
    tiers, latest = read_tiers(folder), list_candidates(folder, "latest")[:1]
    left = [path for path in list_step_folders(folder) if path not in targets]
    if not any(find_damage(path, thorough=False) == "" for path in left):
        complete = "complete " if left else ""
        raise UserError(
            f"{_join(targets)}: the run would have no {complete}checkpoint left; gptmill runs remove deletes a whole "
            f"run, and --force removes it all the same"
        )
    for path in targets:
        roles = [LATEST] if [path] == latest else []
        roles += [BEST] if tiers.get(BEST) == path else []
        if roles:
            raise UserError(
                f"{path.name} is the run's {' and '.join(roles)}; add --force to remove it all the same, or name "
                f"another one (gptmill checkpoints list {folder.parent})"
            )


def remove_checkpoints(folder: Path, targets: Sequence[Path]) -> list[str]:
    """Deletes checkpoints with their tiers; returns which tiers now link to another one, in words.

    latest and best_model are linked to what remains before anything is deleted, so that a kill leaves no run without.
    """
    before = read_tiers(folder)
    left = [path for path in list_candidates(folder, "latest") if path not in targets]
    moved = {}
    if before.get(LATEST) in targets and left:
        moved[LATEST] = next((path for path in left if not find_damage(path, thorough=False)), left[0])
    if before.get(BEST) in targets and (best := find_best(left)):
        moved[BEST] = best
    for tier, path in moved.items():
        link_tier(folder, tier, path)
    if before.get(BACKUP) == moved.get(LATEST, folder):
        (folder / BACKUP).unlink(missing_ok=True)  # the next save links it
    for path in targets:
        remove_tiers(folder, path)
        flush_to_disk(folder)
        delete_checkpoint(path)
    return [f"{tier} is now {path.name}" for tier, path in moved.items()]


def _join(targets: Sequence[Path]) -> str:
    return ", ".join(path.name for path in targets)
