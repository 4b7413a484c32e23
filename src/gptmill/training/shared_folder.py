"""The run's folder as ranks that save together need it: all of them see what rank 0 writes there."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import torch

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint, Held
from gptmill.runs.checkpoints.joint_save import Writers
from gptmill.runs.checkpoints.storage import measure_checkpoint
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_json

SIGHT_SECONDS = 10.0  # network file systems may show a new file late


def check_shared_folder(folder: Path, world: World) -> str:
    """Returns a token of this start of the run; raises UserError on all ranks if one does not see the folder.

    The folder need not exist yet: its nearest parent that does is tried, on rank 0's word.
    """
    parents = [folder.absolute(), *folder.absolute().parents]
    levels = next(number for number, parent in enumerate(parents) if parent.is_dir())
    levels, token = broadcast_json([levels, secrets.token_hex(4)], world)
    assert isinstance(token, str)
    probe = parents[levels] / f".gptmill-{token}.probe"

    def write() -> None:
        try:
            probe.write_text(token, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to {parents[levels]}: {error.strerror}; choose another --logdir") from None

    world.run_on_main(write)
    try:
        is_blind = torch.tensor(float(not _appears(probe, token)), device=world.device)
        blind = int(world.all_reduce_sum(is_blind).item())
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"{blind} of {world.size} ranks do not see {folder}, where all of them save their shards; "
            f"choose a --logdir on a file system that all machines share, or add --parallel ddp --no_exact_ranks"
        )
    return token


def join_writers(token: str, checkpoint: Checkpoint[Held], world: World) -> Writers:
    """The ranks that save checkpoints of this size together. All ranks call it."""
    own = measure_checkpoint(checkpoint, world.rank)
    total = world.all_reduce_sum(torch.tensor(float(own), dtype=torch.float64, device=world.device))
    return Writers(world.rank, world.size, token, int(total.item()))


def _appears(probe: Path, token: str) -> bool:
    deadline = time.monotonic() + SIGHT_SECONDS
    while True:
        try:
            if probe.read_text(encoding="utf-8") == token:
                return True
        except OSError:
            pass  # not yet, or never
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
