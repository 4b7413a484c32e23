"""One rank of several that save a state and then resume from what other numbers of ranks and strategies have saved.

Started by the test beside as `resharding_ranks.py NAME FOLDER OTHERS`: saves to FOLDER/NAME, waits until all OTHERS
have saved, and restores each of theirs. Nothing is trained: every element says where it belongs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tiny import make_config
from torch import Tensor

from gptmill.config.run import RunConfig
from gptmill.runs.checkpoints.content import Held, Shard
from gptmill.runs.checkpoints.selection import load_chosen
from gptmill.runs.checkpoints.sharded_state import saves_jointly
from gptmill.runs.checkpoints.storage import list_step_folders
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.world import World, open_world
from gptmill.training.checkpointing import GROUPS, Checkpointer
from gptmill.training.joint_reading import open_jointly
from gptmill.training.plan import CorpusSize, MachineRate, derive_plan
from gptmill.training.shared_folder import check_shared_folder, join_writers
from gptmill.training.state import TrainState, build_state

STEP = 7
LIMIT_SECONDS = 200.0
FIELDS = {"num_layers": 1, "ema_decay": 0.9, "guard": "rollback"}


def choose(name: str) -> RunConfig:
    """one-1, ddp-2, fsdp-3, tp-2, ...: the strategy, or the axis of tensor parallelism, and the number of ranks."""
    strategy, _, count = name.partition("-")
    fields = {"tensor_parallel": int(count)} if strategy == "tp" else {"parallel": strategy.replace("one", "ddp")}
    return make_config(**FIELDS, exact_ranks=False, **fields)


def make_whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers that no other tensor has at the same place."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def fill(tensors: Mapping[str, Mapping[str, Held]], *, is_zero: bool = False) -> None:
    for group, named in tensors.items():
        for name, item in named.items():
            whole = make_whole(f"{group}/{name}", tuple(item.shape), item.dtype)
            if is_zero:
                whole.zero_()
            if isinstance(item, Shard):
                for part in item.list_parts():
                    item.tensor[part.index] = whole[part.box.index]
            else:
                item.copy_(whole)


def check(tensors: Mapping[str, Mapping[str, Held]], source: str) -> None:
    for group, named in tensors.items():
        for name, item in named.items():
            whole = make_whole(f"{group}/{name}", tuple(item.shape), item.dtype)
            parts = item.list_parts() if isinstance(item, Shard) else ()
            equal = [item.tensor[part.index].equal(whole[part.box.index]) for part in parts]  # type: ignore[union-attr]
            assert all(equal) if parts else item.equal(whole), f"{group}/{name} of {source}"  # type: ignore[union-attr]


def build(name: str, world: World) -> tuple[RunConfig, TrainState]:
    config = choose(name)
    size = CorpusSize(256, 1000, 1, None)
    return config, build_state(config, derive_plan(config, size, MachineRate(1, "fp32", False, None), ()), world)


def save(config: RunConfig, state: TrainState, run: RunDirectory, world: World) -> None:
    """Saves as a run does; and rolls back to a snapshot in memory, then to the checkpoint."""
    is_joint = saves_jointly(world)
    token = check_shared_folder(run.checkpoints, world) if is_joint else ""
    writers = join_writers(token, state.make_checkpoint({}), world) if is_joint else None
    with Checkpointer(run, config, {}, world, STEP, writers) as checkpointer:
        state.step = STEP
        checkpointer.take_snapshot(state)
        fill(state.make_checkpoint({}).tensors, is_zero=True)
        older = checkpointer.find_older(STEP)
        assert older is not None
        state.restore(older, "a snapshot", is_own=True)
        check(state.make_checkpoint({}).tensors, "a snapshot")
        checkpointer.save(state, [], lambda: None)
        assert checkpointer.finish(lambda: None), checkpointer.collect()
        world.any_rank(False)  # rank 0 has published what the others have written
        checkpointer._snapshots.drop_later(0)
        fill(state.make_checkpoint({}).tensors, is_zero=True)
        saved = checkpointer.find_older(STEP)
        assert saved is not None
        state.restore(saved, "its own checkpoint", is_own=True)
        check(state.make_checkpoint({}).tensors, "its own checkpoint")


def restore(state: TrainState, run: RunDirectory, world: World, *, is_joint: bool) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not list_step_folders(run.checkpoints):
        assert time.monotonic() < deadline, f"{run.path} was not saved"
        time.sleep(0.02)
    fill(state.make_checkpoint({}).tensors, is_zero=True)
    (path,) = list_step_folders(run.checkpoints)
    if is_joint:
        state.restore(open_jointly(path, GROUPS, world), str(path))
    else:
        state.restore(load_chosen(run.checkpoints, "latest", GROUPS).checkpoint, str(path))
    check(state.make_checkpoint({}).tensors, str(path))


def main(name: str, folder: Path, others: list[str]) -> None:
    with open_world("cpu") as world:
        machine = choose(name).machine
        world = arrange_ranks(world, "ddp" if machine.parallel == "auto" else machine.parallel, machine)
        config, state = build(name, world)
        fill(state.make_checkpoint({}).tensors)
        save(config, state, RunDirectory(folder / name), world)
        for other in others:
            restore(state, RunDirectory(folder / other), world, is_joint=saves_jointly(world))
        world.any_rank(False)  # no rank leaves while another still needs it


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","))
