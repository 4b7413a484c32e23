"""The tree of additions: the same sum, to the bit, however the summands are divided among ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptmill.training.exact_sum import Node, TreeSum, list_nodes, list_numbers, sum_nodes


def add_by_definition(leaves: list[Tensor], level: int, place: int) -> Tensor:
    """The node's left half plus its right half, where that has any numbers."""
    if level == 0:
        return leaves[place]
    left = add_by_definition(leaves, level - 1, 2 * place)
    if (2 * place + 1) << (level - 1) >= len(leaves):
        return left
    return left + add_by_definition(leaves, level - 1, 2 * place + 1)


def add_on_ranks(leaves: list[Tensor], ranks: int) -> Tensor:
    nodes = []
    for rank in range(ranks):
        tree = TreeSum()
        for number in list_numbers(len(leaves) // ranks, rank, ranks, is_exact=True):
            tree.push(Node(0, number), [leaves[number].clone()])
        nodes += tree.take_nodes()
    (total,) = sum_nodes(nodes)
    return total


@pytest.mark.parametrize("count", [*range(1, 33), 36, 48, 60, 96, 100])
def test_any_number_of_ranks_adds_up_in_the_same_tree(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    leaves = [torch.randn(64, generator=generator) * 10**spread for spread in torch.linspace(-3, 3, count).tolist()]
    expected = add_by_definition(leaves, (count - 1).bit_length(), 0)
    if count > 4:
        assert not torch.stack(leaves).sum(dim=0).equal(expected), "these numbers do not show the order of addition"
    for ranks in (ranks for ranks in range(1, count + 1) if count % ranks == 0):
        assert add_on_ranks(leaves, ranks).equal(expected), ranks


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_block_consists_of_few_whole_nodes(count: int, ranks: int) -> None:
    for rank in range(ranks):
        numbers = list_numbers(count, rank, ranks, is_exact=True)
        nodes = list_nodes(numbers)
        covered = [n for level, place in nodes for n in range(place << level, (place + 1) << level)]
        assert covered == list(numbers)
        assert len(nodes) <= 2 * count.bit_length()
        tree = TreeSum()
        for number in numbers:
            tree.push(Node(0, number), [torch.ones(1)])
        assert [node for node, _ in tree.take_nodes()] == nodes


def test_a_power_of_two_is_one_node() -> None:
    assert [list_nodes(range(8 * rank, 8 * rank + 8)) for rank in range(3)] == [[Node(3, rank)] for rank in range(3)]


def test_little_memory_is_needed() -> None:
    tree = TreeSum()
    for number in range(1000):
        tree.push(Node(0, number), [torch.ones(1)])
        assert len(tree._pending) <= 10
    assert tree.finish()[0].item() == 1000


@pytest.mark.parametrize("is_exact", [True, False])
def test_every_micro_batch_is_computed_once(is_exact: bool) -> None:
    for count, ranks in ((1, 4), (3, 2), (5, 3)):
        numbers = [n for rank in range(ranks) for n in list_numbers(count, rank, ranks, is_exact=is_exact)]
        assert sorted(numbers) == list(range(count * ranks))
