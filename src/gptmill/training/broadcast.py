"""One rank reads a state, all of them get it: a run's folder need not be on every machine, nor be read by all."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runtime.world import World


def broadcast_checkpoint(checkpoint: Checkpoint | None, world: World) -> Checkpoint | None:
    """What the main rank holds, on every rank, in host memory."""
    if world.size == 1:
        return checkpoint
    described = _broadcast_json(_describe(checkpoint), world)
    if described is None:
        return None
    tensors: dict[str, dict[str, Tensor]] = {group: {} for group in described["tensors"]}
    for group, entries in described["tensors"].items():
        for name, dtype, shape in entries:
            if checkpoint is not None:
                moving = checkpoint.tensors[group][name].to(world.device)
            else:
                moving = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            dist.broadcast(moving, src=0)
            tensors[group][name] = moving.cpu()  # one at a time: the device may have no room for all
    return checkpoint or Checkpoint(described["step"], tensors, described["values"])


def _describe(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    tensors = {
        group: [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named.items()]
        for group, named in checkpoint.tensors.items()
    }
    return {"step": checkpoint.step, "values": checkpoint.values, "tensors": tensors}


def _broadcast_json(value: Any, world: World) -> Any:
    """The main rank's value on every rank. As JSON: torch's own way to send objects unpickles what arrives."""
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    length = torch.tensor(len(content), device=world.device)
    dist.broadcast(length, src=0)
    if not world.is_main:
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=world.device)
    dist.broadcast(content, src=0)
    return json.loads(bytes(content.cpu().tolist()))
