"""Gathers the tensors of a sharded state, so that rank 0 can save whole ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runtime.parallel.layouts import Layout, gather_wholes
from gptmill.runtime.parallel.local_shards import gather_whole
from gptmill.runtime.world import World


@torch.no_grad()
def gather_checkpoint(checkpoint: Checkpoint, world: World, layouts: Mapping[str, Layout]) -> Checkpoint:
    """The checkpoint with whole tensors in the host memory of rank 0; empty on the others. All ranks call it."""
    whole = {}
    for group, named in checkpoint.tensors.items():
        joined = gather_wholes(named, layouts)
        gathered = ((name, gather_whole(tensor)) for name, tensor in joined)  # one at a time on the device
        whole[group] = {name: tensor.cpu() for name, tensor in gathered if world.is_main}
    return Checkpoint(checkpoint.step, whole, checkpoint.values)
