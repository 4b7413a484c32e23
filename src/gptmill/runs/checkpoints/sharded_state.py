"""What this rank holds of a state: whole tensors, or shards with their place in the global ones; and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from gptmill.runs.checkpoints.content import Checkpoint, Held, Part, Shard
from gptmill.runs.checkpoints.saved_tensors import SavedTensor
from gptmill.runs.checkpoints.tiling import Box, Extent
from gptmill.runtime.parallel.layouts import Layout, find_layout
from gptmill.runtime.parallel.local_shards import find_place, is_sharded, to_local
from gptmill.runtime.world import World

Saved: TypeAlias = Tensor | Shard | SavedTensor
"""A tensor to load: whole, this rank's shard of a snapshot, or in the files of a checkpoint."""


def saves_jointly(world: World) -> bool:
    """Whether ranks hold different tensors, and save them together. The same on every rank."""
    return world.size > 1 and (world.shards_weights or world.strategy == "zero1")


def hold(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout] | None = None) -> dict[str, Held]:
    """The live tensors of this rank; of one that is sharded (a DTensor) or split by a layout, the part that it has."""
    found = {name: (tensor, find_layout(name, layouts or {})) for name, tensor in tensors.items()}
    return {
        name: _hold_share(tensor, layout) if layout and layout.splits(tensor) else _hold(tensor)
        for name, (tensor, layout) in found.items()
    }


def hold_alone(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Whole live tensors that no other rank has."""
    return {name: Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in tensors.items()}


def keep_whole(checkpoint: Checkpoint[Held]) -> Checkpoint[Tensor]:
    """What all ranks have, and rank 0 saves."""
    whole = {
        group: {name: item for name, item in named.items() if isinstance(item, Tensor)}
        for group, named in checkpoint.tensors.items()
    }
    return Checkpoint(checkpoint.step, whole, checkpoint.values)


def drop_whole(checkpoint: Checkpoint[Held]) -> Checkpoint[Held]:
    """What only this rank can save and restore: rank 0 has the rest."""
    shards = {
        group: {name: item for name, item in named.items() if isinstance(item, Shard)}
        for group, named in checkpoint.tensors.items()
    }
    return Checkpoint(checkpoint.step, shards, checkpoint.values)


@torch.no_grad()
def load(held: Mapping[str, Held], saved: Mapping[str, Saved]) -> None:
    """Copies saved tensors into live ones; reads no more of each than this rank holds."""
    for name, item in held.items():
        source = saved[name]
        if isinstance(source, Shard):
            assert isinstance(item, Shard), "a snapshot has the layout of the state it was taken from"
            item.tensor.copy_(source.tensor)
        elif isinstance(item, Shard):
            for part in item.list_parts():
                item.tensor[part.index].copy_(_cut(source, part.box))
        else:
            item.copy_(read_whole(source))


def read_whole(saved: Saved) -> Tensor:
    assert not isinstance(saved, Shard), "a shard is not whole"
    return saved.read() if isinstance(saved, SavedTensor) else saved


def _cut(saved: Tensor | SavedTensor, box: Box) -> Tensor:
    return saved.read_slice(box) if isinstance(saved, SavedTensor) else saved[box.index]


def _hold_share(tensor: Tensor, layout: Layout) -> Shard:
    def place(start: int, length: int) -> tuple[Extent, Extent]:
        """Offset and shape of a range along the split dimension."""
        offset, shape = [0] * tensor.dim(), list(tensor.shape)
        offset[layout.dim], shape[layout.dim] = start, length
        return tuple(offset), tuple(shape)

    spans = layout.list_spans()
    parts = [Part(place(span.local_start, 0)[0], Box(*place(span.whole_start, span.length))) for span in spans]
    _, whole = place(0, layout.whole_length)
    return Shard(tensor, whole, parts[0].box.offset, layout.is_saved, tuple(parts) if len(parts) > 1 else ())


def _hold(tensor: Tensor) -> Held:
    if not is_sharded(tensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.size() == 1 or all(placement.is_replicate() for placement in placements):
        return to_local(tensor)
    _, offset = find_place(tensor)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    # Of the replicas of a shard, the first is saved.
    replicas = (place for place, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())
    return Shard(to_local(tensor), tuple(tensor.shape), offset, is_written=not any(replicas))
