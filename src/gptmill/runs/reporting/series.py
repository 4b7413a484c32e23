"""A curve in bounded memory: however many points it gets, it keeps some thousand groups with their extremes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

MAX_GROUPS = 2048
WINDOW = 0.04  # of the steps so far, to both sides, that a moving mean takes in


@dataclass
class Group:
    """Neighbouring points of a curve."""

    first: int
    """The first step."""
    last: int
    """The last step."""
    low: float
    high: float
    total: float
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count

    def absorb(self, other: Group) -> None:
        """Extends this group by the one after it."""
        self.last = other.last
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total
        self.count += other.count


class Series:
    """The finite values of one metric by step; a group never mixes so much that a spike would vanish."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.groups: list[Group] = []
        self.not_finite = 0
        self._max_groups = max_groups
        self._group_size = 1

    def add(self, step: int, value: float) -> None:
        """Appends a point; one at an earlier step replaces everything from there on."""
        while self.groups and self.groups[-1].first >= step:
            self.groups.pop()
        if not math.isfinite(value):
            self.not_finite += 1
            return
        point = Group(step, step, value, value, value, 1)
        if self.groups and self.groups[-1].count < self._group_size:
            self.groups[-1].absorb(point)
            return
        self.groups.append(point)
        if len(self.groups) > self._max_groups:
            self._merge_pairs()

    def slice(self, first: int, last: int) -> list[Group]:
        """Returns the groups that end in these steps."""
        return [group for group in self.groups if first <= group.last <= last]

    def smooth(self, points: int = 160, *, logarithmic: bool = False) -> list[tuple[float, float]]:
        """Returns the curve as moving means, in at most so many points, spread evenly over the axis.

        The window grows with the step, so that neither the steep start nor the slow end is blurred.
        """
        groups, count = self.groups, len(self.groups)
        totals = [0.0, *accumulate(group.total for group in groups)]
        counts = [0, *accumulate(group.count for group in groups)]
        curve = []
        for position in _spread(count, points, logarithmic=logarithmic):
            reach = max(1, round(WINDOW * position)) if count > 3 else 0
            start, end = max(0, position - reach), min(count, position + reach + 1)
            mean = (totals[end] - totals[start]) / (counts[end] - counts[start])
            curve.append(((groups[position].first + groups[position].last) / 2, mean))
        return curve

    def _merge_pairs(self) -> None:
        for left, right in zip(self.groups[::2], self.groups[1::2], strict=False):
            left.absorb(right)
        self.groups = self.groups[::2]
        self._group_size *= 2


def _spread(count: int, points: int, *, logarithmic: bool) -> list[int]:
    """Returns positions from the first to the last."""
    if count <= points:
        return list(range(count))
    if logarithmic:
        return sorted({round(count ** (number / (points - 1))) - 1 for number in range(points)})
    return [round(number * (count - 1) / (points - 1)) for number in range(points)]


def compute_mean(groups: list[Group]) -> float:
    return sum(group.total for group in groups) / sum(group.count for group in groups)


def compute_median(groups: list[Group]) -> float:
    """Returns the median of the groups' means, each weighted by its points."""
    ranked = sorted(groups, key=lambda group: group.mean)
    half, seen = sum(group.count for group in groups) / 2, 0
    for group in ranked:
        seen += group.count
        if seen >= half:
            return group.mean
    raise ValueError("no groups")
