"""Opens a checkpoint on all ranks at once: they divide the checksums, and each then reads its own slices."""

from __future__ import annotations

from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.saved_tensors import SavedTensor
from gptmill.runs.checkpoints.storage import find_damage, open_checkpoint
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_json


def open_jointly(path: Path, groups: tuple[str, ...], world: World) -> Checkpoint[SavedTensor]:
    """All ranks call it; raises UserError on all of them if one finds the checkpoint damaged, or cannot read it."""
    damage, opened = find_damage(path, thorough=True, rank=world.rank, ranks=world.size), None
    if not damage:
        try:
            opened = open_checkpoint(path, groups)
        except UserError as error:
            damage = str(error)
    if world.any_rank(bool(damage)):
        # Rank 0 says it for all, so it looks at all files where another rank found the damage.
        described = broadcast_json(damage or find_damage(path, thorough=True), world)
        raise UserError(described or f"a rank other than 0 cannot read checkpoint {path}; check its machine")
    assert opened is not None
    return opened
