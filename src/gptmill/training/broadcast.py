"""Broadcasts a checkpoint from rank 0, so that only rank 0 needs access to the run's directory.

Where ranks hold shards, each has its own of a snapshot, and only what all ranks have comes from rank 0.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.config.json_text import parse_json
from gptmill.runs.checkpoints.content import Checkpoint, Held
from gptmill.runs.checkpoints.sharded_state import keep_whole
from gptmill.runtime.world import World


def broadcast_checkpoint(checkpoint: Checkpoint[Tensor] | None, world: World) -> Checkpoint[Tensor] | None:
    """The checkpoint of rank 0 in the host memory of every rank; None if rank 0 has none."""
    if world.size == 1:
        return checkpoint
    described = broadcast_json(_describe(checkpoint), world)
    if described is None:
        return None
    tensors: dict[str, dict[str, Tensor]] = {group: {} for group in described["tensors"]}
    for group, entries in described["tensors"].items():
        for name, dtype, shape in entries:
            if checkpoint is not None:
                buffer = checkpoint.tensors[group][name].to(world.device)
            else:
                buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            dist.broadcast(buffer, src=0)
            tensors[group][name] = buffer.cpu()  # one at a time: they may not all fit on the device
    return checkpoint or Checkpoint(described["step"], tensors, described["values"])


def complete_snapshot(snapshot: Checkpoint[Held], world: World) -> Checkpoint[Held]:
    """This rank's part of a snapshot, with the whole tensors and the values that rank 0 keeps for all."""
    shared = broadcast_checkpoint(keep_whole(snapshot) if world.is_main else None, world)
    assert shared is not None
    tensors: dict[str, dict[str, Held]] = {group: {**named} for group, named in snapshot.tensors.items()}
    for group, named in shared.tensors.items():
        tensors[group] |= named
    return Checkpoint(shared.step, tensors, shared.values)


def broadcast_json(value: Any, world: World) -> Any:
    """The value of rank 0 on every rank. As JSON, because torch's broadcast_object_list unpickles."""
    if world.size == 1:
        return value
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    length = torch.tensor(len(content), device=world.device)
    dist.broadcast(length, src=0)
    if not world.is_main:
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=world.device)
    dist.broadcast(content, src=0)
    return parse_json(bytes(content.cpu().tolist()))


def _describe(checkpoint: Checkpoint[Tensor] | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    tensors = {
        group: [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named.items()]
        for group, named in checkpoint.tensors.items()
    }
    return {"step": checkpoint.step, "values": checkpoint.values, "tensors": tensors}
