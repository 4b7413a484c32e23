"""What differs between two checkpoints: config, values, and every tensor, of which one at a time is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.renamed import use_current_names
from gptmill.runs.checkpoints.manifest import read_manifest
from gptmill.runs.checkpoints.storage import find_damage

PIECE_NUMBERS = 1 << 20  # of a tensor that are compared at once
NAMED_TENSORS = 10  # that differ most
ABSENT = "absent"


@dataclass(frozen=True)
class TensorDifference:
    """How far apart two tensors of one name are."""

    name: str
    max_abs: float
    """Largest difference of two numbers; infinite where only one of them is finite."""
    norm_change: float
    """Change of the norm, relative to the first one's."""
    alike: int = 1
    """Tensors that differ by exactly as much, such as an optimizer's counters; this is the first of them."""


@dataclass(frozen=True)
class GroupComparison:
    """One file of tensors in both checkpoints."""

    name: str
    identical: int
    """Tensors of which every bit is the same."""
    differing: int
    """Tensors of the same shape with other numbers in them."""
    largest: list[TensorDifference]
    """Those that differ most, the furthest first."""
    reshaped: list[str]
    """Tensors of another shape or type, as NAME: OLD -> NEW."""
    missing: list[str]
    """Names that only the first checkpoint has."""
    new: list[str]
    """Names that only the second checkpoint has."""

    @property
    def total(self) -> int:
        return self.identical + self.differing + len(self.reshaped) + len(self.missing) + len(self.new)


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints, the second seen from the first."""

    first: Path
    second: Path
    config: list[str]
    """Settings that differ, as NAME: OLD -> NEW."""
    values: list[str]
    """The same of everything else that is not a tensor: step, losses, data position, versions."""
    groups: list[GroupComparison]

    @property
    def tensors(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def identical(self) -> int:
        return sum(group.identical for group in self.groups)

    @property
    def has_same_tensors(self) -> bool:
        """Every tensor of either checkpoint is in the other, bit for bit."""
        return self.identical == self.tensors

    @property
    def largest(self) -> TensorDifference | None:
        """The tensor that differs most, of those that both have."""
        return max((group.largest[0] for group in self.groups if group.largest), key=_rank, default=None)


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Raises UserError for a checkpoint that cannot be read. Checksums of tensors are left to `verify`."""
    for path in (first, second):
        if damage := find_damage(path, thorough=False):
            raise UserError(damage)
    one, other = read_manifest(first), read_manifest(second)
    before, after = dict(one.values), dict(other.values)
    config = _list_changes(*(use_current_names(values.pop("config", {})) for values in (before, after)))
    values = _list_changes({"step": one.step, **before}, {"step": other.step, **after})
    groups = [
        _compare_files(first / name if name in one.files else None, second / name if name in other.files else None)
        for name in sorted({**one.files, **other.files})
    ]
    return Comparison(first, second, config, values, groups)


def describe_comparison(comparison: Comparison) -> str:
    """All of it for people, a difference a line."""
    lines = [f"{comparison.first} -> {comparison.second}"]
    for title, changes in (("config", comparison.config), ("values", comparison.values)):
        lines.append(f"{title}: " + ("the same" if not changes else f"{len(changes):,} differ"))
        lines += [f"  {change}" for change in changes]
    for group in comparison.groups:
        lines.append(f"{group.name}: {group.identical:,} of {group.total:,} tensors are bit-identical")
        listed = (("only in the first", group.missing), ("only in the second", group.new), ("other", group.reshaped))
        for title, names in listed:
            lines += [f"  {title}: {name}" for name in names[:NAMED_TENSORS]]
            lines += [f"  {title}: {len(names) - NAMED_TENSORS:,} more"] if len(names) > NAMED_TENSORS else []
        for item in group.largest:
            alike = f" and {item.alike - 1:,} more" if item.alike > 1 else ""
            lines.append(f"  {item.name}{alike}: by up to {item.max_abs:.3g}, norm by {item.norm_change:+.3%}")
        unnamed = group.differing - sum(item.alike for item in group.largest)
        lines += [f"  {unnamed:,} more that differ less"] if unnamed else []
    return "\n".join(lines)


def _compare_files(first: Path | None, second: Path | None) -> GroupComparison:
    """A checkpoint that has no such file has none of its tensors."""
    group = (first or second or Path()).stem
    with ExitStack() as stack:
        one, other = _open(first, stack), _open(second, stack)
        names, other_names = (set(file.keys()) if file is not None else set() for file in (one, other))
        identical, differing, reshaped = 0, [], []
        for name in sorted(names & other_names):
            a, b = one.get_tensor(name), other.get_tensor(name)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                reshaped.append(f"{name}: {_describe_shape(a)} -> {_describe_shape(b)}")
            elif (difference := _measure(name, a, b)) is not None:
                differing.append(difference)
            else:
                identical += 1
    missing, new = sorted(names - other_names), sorted(other_names - names)
    return GroupComparison(
        group, identical, len(differing), _choose_largest(differing), reshaped, missing=missing, new=new
    )


def _choose_largest(differing: list[TensorDifference]) -> list[TensorDifference]:
    ranked = groupby(sorted(differing, key=_rank, reverse=True), _rank)
    distinct = [list(alike) for _, alike in ranked]
    return [replace(alike[0], alike=len(alike)) for alike in distinct[:NAMED_TENSORS]]


def _open(path: Path | None, stack: ExitStack) -> Any:
    """The file, which reads tensors when they are asked for."""
    if path is None:
        return None
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name}: {error}") from None


def _measure(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """None for tensors that are the same bit for bit, which zeros of either sign and equal NaNs need not be."""
    is_same, furthest, norm_a, norm_b = True, 0.0, 0.0, 0.0
    for piece_a, piece_b in _pair_pieces(a, b):
        is_same = is_same and bool(piece_a.view(torch.uint8).equal(piece_b.view(torch.uint8)))
        x, y = piece_a.double(), piece_b.double()
        distance = (x - y).abs()
        distance[(x == y) | (x.isnan() & y.isnan())] = 0.0  # infinities too
        furthest = max(furthest, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        norm_a, norm_b = math.hypot(norm_a, float(x.norm())), math.hypot(norm_b, float(y.norm()))
    if is_same:
        return None
    change = (norm_b - norm_a) / norm_a if norm_a else math.inf if norm_b else 0.0
    return TensorDifference(name, furthest, change)


def _pair_pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for piece_a, piece_b in zip(a.reshape(-1).split(PIECE_NUMBERS), b.reshape(-1).split(PIECE_NUMBERS), strict=True):
        if piece_a.numel():
            yield piece_a, piece_b


def _rank(difference: TensorDifference) -> tuple[float, float]:
    change = abs(difference.norm_change)
    return difference.max_abs, math.inf if math.isnan(change) else change  # NaN would not sort


def _describe_shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _list_changes(before: Any, after: Any) -> list[str]:
    """NAME: OLD -> NEW for every leaf that differs; names of nested ones are joined by dots."""
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
    """A value on one line: a band of losses or an alphabet would fill pages."""
    text = str(values[name]) if name in values else ABSENT
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"
