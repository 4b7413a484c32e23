"""Where a process starts from: a checkpoint of the run that goes on, or of another one that this run begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.selection import Chosen, load_chosen
from gptmill.runs.checkpoints.storage import load_checkpoint, read_step
from gptmill.runs.checkpoints.tiers import (
    BACKUP,
    LATEST,
    ROLLING,
    find_tier_names,
    link_tier,
    link_tiers,
    make_abandoned_name,
    read_tiers,
)
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_checkpoint
from gptmill.training.checkpointing import GROUPS
from gptmill.training.run_request import RunRequest


@dataclass(frozen=True)
class Start:
    """The state to start from, and where it was found."""

    checkpoint: Checkpoint
    path: str
    parent: str
    """The checkpoint of another run that this run began with; empty for one that began by itself."""
    is_newest: bool = False
    complaints: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"checkpoint {self.path}"

    def settle(self, folder: Path, keep: int) -> str:
        """Makes this checkpoint the latest of its run, so that a kill before the next save does not undo the choice.

        The newest gets the tiers that it was saved for, since a kill may have come before they were linked. What the
        run goes back behind on purpose is kept under other names, where it was to be kept; returns what to say of it.
        """
        chosen, tiers = folder / Path(self.path).name, read_tiers(folder)
        if self.is_newest:
            link_tiers(folder, chosen, find_tier_names(self.checkpoint.values.get("tiers")), keep)
            return ""
        lasting = {path for tier, path in tiers.items() if not tier.startswith((ROLLING, BACKUP))}
        later = [] if self.complaints else [path for path in lasting if read_step(path) > read_step(chosen)]
        for path in later:
            link_tier(folder, make_abandoned_name(read_step(path)), path)
        link_tier(folder, LATEST, chosen)
        if not later:
            return ""
        names = ", ".join(sorted(make_abandoned_name(read_step(path)) for path in later))
        return (
            f"going back to step {read_step(chosen)}: what was saved later goes with the next save, but for {names}, "
            f"until gptmill checkpoints prune"
        )


def read_resume_point(launch: RunRequest, world: World) -> Start | None:
    """The state to start from, read by the main rank alone; None for a run that begins."""
    if launch.resumed is None and launch.parent is None:
        return None
    found: list[Chosen] = []

    def read() -> None:
        if launch.parent is not None:
            found.append(Chosen(load_checkpoint(launch.parent, GROUPS), launch.parent, []))
        elif launch.resumed is not None:
            found.append(load_chosen(launch.resumed.checkpoints, launch.wanted, GROUPS))

    world.run_on_main(read)
    checkpoint = broadcast_checkpoint(found[0].checkpoint if found else None, world)
    assert checkpoint is not None
    parent = str(launch.parent) if launch.parent is not None else str(checkpoint.values.get("parent", ""))
    if not found:
        return Start(checkpoint, f"of rank 0, step {checkpoint.step}", parent)
    is_newest = launch.wanted == "latest" and not found[0].complaints
    return Start(checkpoint, str(found[0].path), parent, is_newest, found[0].complaints)
