"""Boxes in a global tensor: which part of a slice each holds, and whether together they are the whole, exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

MAX_CUT_AXES = 4  # dimensions along which a tensor is cut; ranks cut along one or two
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
    found, expected = sum(box.size for box in filled), prod(shape)
    if found < expected:
        return f"its shards hold {found:,} of {expected:,} elements"
    cut = [axis for axis, length in enumerate(shape) if any(box.shape[axis] != length for box in filled)]
    if len(cut) > MAX_CUT_AXES:
        return f"it is cut along {len(cut)} dimensions"
    # A sum of boxes is known by its corners, counted with alternating signs: its mixed difference. So this takes as
    # many steps as there are boxes, where comparing each with each would take the square of that.
    corners = Counter[Extent]()
    for box, weight in [*((box, 1) for box in filled), *([(cover(shape), -1)] if expected else [])]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(box.offset[axis] + is_end * box.shape[axis] for axis, is_end in zip(cut, ends, strict=True))
            corners[corner] += weight * (-1) ** sum(ends)
    return "two shards overlap" if any(corners.values()) else ""
