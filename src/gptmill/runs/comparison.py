"""Compares two checkpoints: config, values and tensors, with one pair of tensors in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.renamed import use_current_names
from gptmill.runs.checkpoints.manifest import Manifest, find_group, read_manifest
from gptmill.runs.checkpoints.saved_tensors import SavedTensor, open_tensors
from gptmill.runs.checkpoints.storage import find_damage

CHUNK_ELEMENTS = 1 << 20  # compared at once
MAX_LISTED = 10
ABSENT = "absent"


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors of the same name."""

    name: str
    max_abs: float
    """Largest absolute difference of two elements; infinite if only one of them is finite."""
    norm_change: float
    """Relative change of the norm."""
    count: int = 1
    """How many tensors differ by exactly this much, such as optimizer step counters; this is the first of them."""


@dataclass(frozen=True)
class GroupComparison:
    """One group of tensors in both checkpoints."""

    name: str
    identical: int
    """Bit-identical tensors."""
    differing: int
    """Tensors of the same shape and dtype with different values."""
    largest: list[TensorDifference]
    """The largest differences, in descending order."""
    reshaped: list[str]
    """Tensors of different shape or dtype, as NAME: OLD -> NEW."""
    missing: list[str]
    """Names only in the first checkpoint."""
    new: list[str]
    """Names only in the second checkpoint."""

    @property
    def total(self) -> int:
        return self.identical + self.differing + len(self.reshaped) + len(self.missing) + len(self.new)


@dataclass(frozen=True)
class Comparison:
    """The differences of a second checkpoint from a first."""

    first: Path
    second: Path
    config: list[str]
    """Config differences, as NAME: OLD -> NEW."""
    values: list[str]
    """Differences in the other values: step, losses, data position, versions."""
    groups: list[GroupComparison]

    @property
    def tensors(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def identical(self) -> int:
        return sum(group.identical for group in self.groups)

    @property
    def has_same_tensors(self) -> bool:
        """Whether both checkpoints have the same tensors, bit for bit."""
        return self.identical == self.tensors

    @property
    def largest(self) -> TensorDifference | None:
        """The largest difference between tensors that both have."""
        return max((group.largest[0] for group in self.groups if group.largest), key=_rank, default=None)


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compares two checkpoints; raises UserError if one cannot be read. Does not verify tensor checksums."""
    for path in (first, second):
        if damage := find_damage(path, thorough=False):
            raise UserError(damage)
    old, new = read_manifest(first), read_manifest(second)
    before, after = dict(old.values), dict(new.values)
    config = _list_changes(*(use_current_names(values.pop("config", {})) for values in (before, after)))
    for each in (before, after):
        each.pop("logs", None)  # differs between equal runs, as times do
    values = _list_changes({"step": old.step, **before}, {"step": new.step, **after})
    names = sorted({find_group(name) for name in (*old.files, *new.files)})
    groups = [_compare_group(name, _open(first, old, name), _open(second, new, name)) for name in names]
    return Comparison(first, second, config, values, groups)


def describe_comparison(comparison: Comparison) -> str:
    """Describes the comparison, one difference per line."""
    lines = [f"{comparison.first} -> {comparison.second}"]
    for title, changes in (("config", comparison.config), ("values", comparison.values)):
        lines.append(f"{title}: " + ("the same" if not changes else f"{len(changes):,} differ"))
        lines += [f"  {change}" for change in changes]
    for group in comparison.groups:
        lines.append(f"{group.name}: {group.identical:,} of {group.total:,} tensors are bit-identical")
        listed = (
            ("only in the first", group.missing),
            ("only in the second", group.new),
            ("reshaped", group.reshaped),
        )
        for title, names in listed:
            lines += [f"  {title}: {name}" for name in names[:MAX_LISTED]]
            lines += [f"  {title}: {len(names) - MAX_LISTED:,} more"] if len(names) > MAX_LISTED else []
        for item in group.largest:
            more = f" and {item.count - 1:,} more" if item.count > 1 else ""
            lines.append(f"  {item.name}{more}: by up to {item.max_abs:.3g}, norm by {item.norm_change:+.3%}")
        unlisted = group.differing - sum(item.count for item in group.largest)
        lines += [f"  {unlisted:,} more that differ less"] if unlisted else []
    return "\n".join(lines)


def _compare_group(group: str, one: dict[str, SavedTensor], other: dict[str, SavedTensor]) -> GroupComparison:
    """Compares the tensors of a group, whatever files and shards they are in."""
    identical, differing, reshaped = 0, [], []
    for name in sorted(one.keys() & other.keys()):
        old, new = one[name], other[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            reshaped.append(f"{name}: {_describe_shape(old)} -> {_describe_shape(new)}")
        elif (difference := _measure(name, old.read(), new.read())) is not None:
            differing.append(difference)
        else:
            identical += 1
    missing, new_names = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    return GroupComparison(
        group, identical, len(differing), _choose_largest(differing), reshaped, missing=missing, new=new_names
    )


def _choose_largest(differing: list[TensorDifference]) -> list[TensorDifference]:
    ranked = groupby(sorted(differing, key=_rank, reverse=True), _rank)
    groups = [list(equal) for _, equal in ranked]
    return [replace(group[0], count=len(group)) for group in groups[:MAX_LISTED]]


def _open(path: Path, manifest: Manifest, group: str) -> dict[str, SavedTensor]:
    return open_tensors(path / name for name in manifest.list_files(group))


def _measure(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """Returns None for bit-identical tensors. Zeros of different sign, or different NaNs, are not identical."""
    is_same, max_abs, norm_a, norm_b = True, 0.0, 0.0, 0.0
    for chunk_a, chunk_b in _pair_chunks(a, b):
        is_same = is_same and bool(chunk_a.view(torch.uint8).equal(chunk_b.view(torch.uint8)))
        x, y = chunk_a.double(), chunk_b.double()
        distance = (x - y).abs()
        distance[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities too
        max_abs = max(max_abs, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        norm_a, norm_b = math.hypot(norm_a, float(x.norm())), math.hypot(norm_b, float(y.norm()))
    if is_same:
        return None
    change = (norm_b - norm_a) / norm_a if norm_a else math.inf if norm_b else 0.0
    return TensorDifference(name, max_abs, change)


def _pair_chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for chunk_a, chunk_b in zip(a.reshape(-1).split(CHUNK_ELEMENTS), b.reshape(-1).split(CHUNK_ELEMENTS), strict=True):
        if chunk_a.numel():
            yield chunk_a, chunk_b


def _rank(difference: TensorDifference) -> tuple[float, float]:
    change = abs(difference.norm_change)
    return difference.max_abs, math.inf if math.isnan(change) else change  # NaN has no order


def _describe_shape(tensor: SavedTensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _list_changes(before: Any, after: Any) -> list[str]:
    """Returns NAME: OLD -> NEW for every leaf that differs; nested names are joined by dots."""
    old, new = dict(_list_leaves(before)), dict(_list_leaves(after))
    return [
        f"{name}: {_shorten(old, name)} -> {_shorten(new, name)}"
        for name in dict.fromkeys([*old, *new])
        if (name in old, old.get(name)) != (name in new, new.get(name))
    ]


def _list_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _list_leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shorten(values: dict[str, Any], name: str) -> str:
    """Returns a value in at most 60 characters: a loss history or a vocabulary would fill pages."""
    text = str(values[name]) if name in values else ABSENT
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"
