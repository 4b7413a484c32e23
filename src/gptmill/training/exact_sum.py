"""A sum over micro-batches whose rounding does not depend on how many ranks compute them.

Floating-point addition is not associative, so every sum follows one binary tree over the global numbers of the
micro-batches. A node of level L covers 2^L numbers from a multiple of 2^L on; its sum is that of its left half plus
that of its right half. Numbers past the last one are left out: such a node is the sum of its left half alone.

A rank computes a contiguous block of numbers, which consists of a few whole nodes. Whoever adds up the nodes of all
ranks in order builds the same tree. Needs the memory of one summand per level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Node(NamedTuple):
    """A node of the tree: numbers place * 2^level to (place + 1) * 2^level - 1."""

    level: int
    place: int

    @property
    def is_right(self) -> bool:
        return self.place % 2 == 1

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.place ^ 1)

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.place // 2)


def list_numbers(count: int, rank: int, size: int, *, is_exact: bool) -> range:
    """The global numbers of the `count` micro-batches that a rank computes in a step.

    A block of its own in an exact sum; else every `size`-th, as DDP's runs have always done.
    """
    if is_exact:
        return range(rank * count, (rank + 1) * count)
    return range(rank, rank + size * count, size)


def list_nodes(numbers: range) -> list[Node]:
    """The fewest whole nodes that consist of these consecutive numbers, in order."""
    nodes: list[Node] = []
    for number in numbers:
        node = Node(0, number)
        while nodes and node.is_right and nodes[-1] == node.sibling:
            nodes.pop()
            node = node.parent
        nodes.append(node)
    return nodes


class TreeSum:
    """Adds up lists of tensors in the tree. Whole nodes come in order, without a gap; adds in place."""

    def __init__(self) -> None:
        self._pending: list[tuple[Node, list[Tensor]]] = []

    def push(self, node: Node, tensors: Sequence[Tensor]) -> None:
        """Takes over the tensors of the next node, and completes all nodes that it completes."""
        summed = list(tensors)
        while node.is_right and self._pending and self._pending[-1][0] == node.sibling:
            _, left = self._pending.pop()
            summed, node = _add(left, summed), node.parent
        self._pending.append((node, summed))

    def __bool__(self) -> bool:
        """Whether anything has been pushed."""
        return bool(self._pending)

    def take_nodes(self) -> list[tuple[Node, list[Tensor]]]:
        """The whole nodes that were pushed, complete as far as possible; none are left."""
        nodes, self._pending = self._pending, []
        return nodes

    def finish(self) -> list[Tensor]:
        """The sum over all numbers; nothing is left."""
        (_, summed), *rest = reversed(self.take_nodes())
        for _, left in rest:
            summed = _add(left, summed)
        return summed


def sum_nodes(nodes: Iterable[tuple[Node, list[Tensor]]]) -> list[Tensor]:
    """The sum over the nodes of all ranks, in order of their numbers. Overwrites tensors among them."""
    tree = TreeSum()
    for node, tensors in nodes:
        tree.push(node, tensors)
    return tree.finish()


def sum_bits(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of each tensor: the sum of its elements' bits, read as integers, for which no order matters."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views = (tensor.detach().reshape(-1).view(integers[tensor.element_size()]) for tensor in tensors)
    return torch.stack([view.sum(dtype=torch.int64) for view in views])


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
