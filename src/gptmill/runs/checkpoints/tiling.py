"""Boxes in a global tensor: which part of a slice each holds, and whether together they are the whole, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offset: Extent
    shape: Extent

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def end(self) -> Extent:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements of both; None if there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - start for start, end in zip(offset, map(min, self.end, other.end), strict=True))
        return Box(offset, shape) if all(length > 0 for length in shape) else None

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the box in the tensor."""
        return tuple(map(slice, self.offset, self.end))

    def locate_in(self, other: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds the other one, which contains it."""
        starts = tuple(start - origin for start, origin in zip(self.offset, other.offset, strict=True))
        return Box(starts, self.shape).index


def cover(shape: Extent) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def find_tiling_error(shape: Extent, boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that should hold every element of the shape once; "" if nothing."""
    if any(len(box.shape) != len(shape) or any(map(int.__gt__, box.end, shape)) for box in boxes):
        return "a shard lies outside of it"
    filled = [box for box in boxes if box.size]
    open_boxes: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offset):
        # Only boxes that reach into these rows can overlap: none where a tensor is cut into rows.
        if shape:
            open_boxes = [earlier for earlier in open_boxes if earlier.end[0] > box.offset[0]]
        if any(box.intersect(earlier) for earlier in open_boxes):
            return "two shards overlap"
        open_boxes.append(box)
    found, expected = sum(box.size for box in filled), prod(shape)
    return "" if found == expected else f"its shards hold {found:,} of {expected:,} elements"
