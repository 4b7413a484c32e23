"""The lock on the run, and the checkpoint that a process starts from: of the resumed run, or of another one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import TrainingConfig
from gptmill.config.schema import build_config
from gptmill.config.settings import read_settings
from gptmill.runs.checkpoints.content import Checkpoint, T
from gptmill.runs.checkpoints.selection import Chosen, find_candidates, try_candidates
from gptmill.runs.checkpoints.sharded_state import Saved
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
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import RunStarted
from gptmill.runs.run_lock import GLANCE_SECONDS, STOPPING_SECONDS, lock_run
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_checkpoint, broadcast_json
from gptmill.training.checkpointing import GROUPS
from gptmill.training.joint_reading import open_jointly
from gptmill.training.run_request import RunRequest


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to start from and where it was found."""

    checkpoint: Checkpoint[Saved]
    path: str
    parent: str
    """The checkpoint of another run from which this run was started; empty for a run started from scratch."""
    is_own: bool = False
    """Whether the checkpoint belongs to the run that is resumed."""
    is_newest: bool = False
    complaints: list[str] = field(default_factory=list)
    """Why newer checkpoints were passed over."""

    @property
    def description(self) -> str:
        return f"checkpoint {self.path}"

    def read_training(self) -> TrainingConfig | None:
        """How the process was configured that saved the checkpoint; None if that was not recorded."""
        if (saved := self.checkpoint.values.get("config")) is None:
            return None
        return build_config(TrainingConfig, read_settings(TrainingConfig, saved, self.description))

    def make_latest(self, folder: Path, keep: int) -> str:
        """Makes this checkpoint the latest of its run, so that a kill before the next save keeps the choice.

        Links the newest checkpoint to its tiers, since a kill may have come before that. When the user resumes from an
        older one, later checkpoints in a permanent tier are kept under other names; returns a warning that says so.
        """
        chosen, tiers = folder / Path(self.path).name, read_tiers(folder)
        if self.is_newest:
            link_tiers(folder, chosen, find_tier_names(self.checkpoint.values.get("tiers")), keep)
            return ""
        permanent = {path for tier, path in tiers.items() if not tier.startswith((ROLLING, BACKUP))}
        later = [] if self.complaints else [path for path in permanent if read_step(path) > read_step(chosen)]
        for path in later:
            link_tier(folder, make_abandoned_name(read_step(path)), path)
        link_tier(folder, LATEST, chosen)
        if not later:
            return ""
        names = ", ".join(sorted(make_abandoned_name(read_step(path)) for path in later))
        return (
            f"resuming from step {read_step(chosen)}: the next save deletes later checkpoints, except {names}, which "
            f"stay until gptmill checkpoints prune"
        )


def hold_run(request: RunRequest, world: World, stack: ExitStack) -> RunDirectory:
    """Locks the run until the stack is closed, before its checkpoints are read.

    The process before may still be saving the last of them: a start that resumes waits for its end.
    """
    tracking = request.config.tracking
    assert tracking.run_name is not None
    run = RunDirectory(Path(tracking.logdir) / tracking.run_name)

    def report_waiting() -> None:
        sys.stderr.write(
            f"{run.path}: waiting up to {STOPPING_SECONDS:.0f} s for another process to stop training it\n"
        )

    def lock() -> None:
        wait_seconds = GLANCE_SECONDS if request.resumed is None else STOPPING_SECONDS
        stack.enter_context(lock_run(run, wait_seconds, report_waiting))

    world.run_on_main(lock)
    return run


def read_resume_point(request: RunRequest, world: World, *, is_joint: bool = False) -> ResumePoint | None:
    """Finds the checkpoint on rank 0, which holds the run's lock, and lets all ranks have it; None to start anew.

    Rank 0 reads and broadcasts it; or, where ranks hold shards (`is_joint`), each opens it to read its slices. A run
    that was killed before its first checkpoint begins again as it did: from scratch, or from the checkpoint of another.
    """
    if request.resumed is None and request.parent is None:
        return None
    found: list[Chosen[Tensor]] = []
    candidates: list[str] = []

    def read() -> None:
        paths = _list_candidates(request)
        candidates.extend(map(str, paths))
        if paths and not is_joint:
            found.append(_choose(request, paths, lambda path: load_checkpoint(path, GROUPS)))

    world.run_on_main(read)
    if is_joint:
        paths = [Path(path) for path in broadcast_json(candidates, world)]
        if not paths:
            return None
        return _describe(_choose(request, paths, lambda path: open_jointly(path, GROUPS, world)), request)
    checkpoint = broadcast_checkpoint(found[0].checkpoint if found else None, world)
    if checkpoint is None:
        return None
    if not found:
        return ResumePoint(checkpoint, f"of rank 0, step {checkpoint.step}", _find_origin(request, checkpoint.values))
    return _describe(found[0], request)


def _list_candidates(request: RunRequest) -> list[Path]:
    """The checkpoints that may be the one to start from: of the resumed run, or the one of another run."""
    run = request.resumed
    if run is not None and (request.wanted != "latest" or run.has_checkpoints):
        return find_candidates(run.checkpoints, request.wanted)
    parent = request.parent or (None if run is None else _find_parent(run))
    return [] if parent is None else [parent]


def _choose(request: RunRequest, paths: list[Path], load: Callable[[Path], Checkpoint[T]]) -> Chosen[T]:
    """The first valid one of the candidates."""
    if not _is_own(request, paths[0]):
        return Chosen(load(paths[0]), paths[0], [])
    return try_candidates(paths[0].parent, request.wanted, paths, load)


def _describe(chosen: Chosen[Any], request: RunRequest) -> ResumePoint:
    path, is_own = str(chosen.path), _is_own(request, chosen.path)
    parent = _find_origin(request, chosen.checkpoint.values) if is_own else path
    is_newest = is_own and request.wanted == "latest" and not chosen.complaints
    return ResumePoint(chosen.checkpoint, path, parent, is_own, is_newest, chosen.complaints)


def _is_own(request: RunRequest, path: Path) -> bool:
    return request.resumed is not None and path.parent == request.resumed.checkpoints


def _find_origin(request: RunRequest, values: dict[str, Any]) -> str:
    """The checkpoint of another run that a run was started from; empty if from none."""
    return str(request.parent) if request.parent is not None else str(values.get("parent", ""))


def _find_parent(run: RunDirectory) -> Path | None:
    """The checkpoint of another run that a run without own checkpoints has started from; None if from none."""
    starts = [event for event in read_events(run.events, missing_ok=True) if isinstance(event, RunStarted)]
    if not starts or not starts[0].resumed_from:
        return None
    path = Path(starts[0].resumed_from)
    if not path.exists():
        raise UserError(
            f"run {run.path} has no checkpoint of its own yet, and {path}, which it started from, is gone; restore "
            f"that, or start a new run"
        )
    return path
