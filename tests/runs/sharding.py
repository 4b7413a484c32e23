"""States cut into shards as strategies do it, and checkpoints of several ranks, saved in the threads of one process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gptmill.config.run import CheckpointConfig
from gptmill.runs.checkpoints.background_save import BackgroundSaver
from gptmill.runs.checkpoints.background_writer import CheckpointWriter, ShardWriter
from gptmill.runs.checkpoints.content import Checkpoint, Held, Shard
from gptmill.runs.checkpoints.joint_save import Writers
from gptmill.runs.checkpoints.storage import list_step_folders, load_checkpoint

Whole = Mapping[str, Mapping[str, Tensor]]


def cut(tensor: Tensor, rank: int, ranks: int) -> Shard:
    """The rows that FSDP gives to a rank: chunks of ceil(n / ranks), of which the last ones may be empty."""
    chunk = -(-tensor.shape[0] // ranks)
    first, last = (min(place * chunk, tensor.shape[0]) for place in (rank, rank + 1))
    return Shard(tensor[first:last], tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)))


def hold_fsdp(tensors: Whole, rank: int, ranks: int) -> dict[str, dict[str, Held]]:
    """Every rank has rows of everything, and all have the step counts."""
    return {
        group: {name: cut(tensor, rank, ranks) if tensor.dim() else tensor for name, tensor in named.items()}
        for group, named in tensors.items()
    }


def hold_zero1(tensors: Whole, rank: int, ranks: int) -> dict[str, dict[str, Held]]:
    """Every rank has the weights, and the optimizer's state of the parameters that it owns."""
    owned = {
        name: Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim())
        for number, (name, tensor) in enumerate(tensors["optimizer"].items())
        if number % ranks == rank
    }
    return {"model": dict(tensors["model"]), "optimizer": dict(owned)}


def hold_hsdp(tensors: Whole, rank: int, ranks: int) -> dict[str, dict[str, Held]]:
    """Two replicas of the shards; the first one saves."""
    half = max(1, ranks // 2)
    held = hold_fsdp(tensors, rank % half, half)
    return {
        group: {
            name: Shard(item.tensor, item.shape, item.offset, is_written=rank < half)
            if isinstance(item, Shard)
            else item
            for name, item in named.items()
        }
        for group, named in held.items()
    }


HOLD = {"fsdp": hold_fsdp, "zero1": hold_zero1, "hsdp": hold_hsdp}


def open_writers(folder: Path, ranks: int, token: str = "abc") -> list[BackgroundSaver]:
    writers = [Writers(rank, ranks, token, 10_000) for rank in range(ranks)]
    main = CheckpointWriter(folder, CheckpointConfig(), writers=writers[0])
    return [main, *(ShardWriter(folder, CheckpointConfig(), each) for each in writers[1:])]


def reshard(path: Path, ranks: int, strategy: str = "fsdp") -> None:
    """Replaces a checkpoint by one of several ranks that holds the same, under the same name."""
    groups = tuple({file.name.partition(".")[0] for file in path.glob("*.safetensors")})
    whole, folder = load_checkpoint(path, groups), path.parent / "resharded"
    writers = open_writers(folder, ranks)
    for rank, writer in enumerate(writers):
        writer.start(Checkpoint(whole.step, HOLD[strategy](whole.tensors, rank, ranks), whole.values), [], lambda: 0.0)
    assert all([writer.finish() for writer in writers])  # noqa: C419 - all of them, or a rank would go on
    shutil.rmtree(path)
    (made,) = list_step_folders(folder)
    made.rename(path)
    shutil.rmtree(folder)
