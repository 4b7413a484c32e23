"""Every rank holds an equal share of each section, and the shares make up the whole in its own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gptmill.runtime.parallel.layouts import Layout, Span, find_layout


class Group:
    """As much of a process group as a layout asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def make_layout(dim: int, sections: tuple[int, ...], rank: int = 0, size: int = 2) -> Layout:
    group: Any = Group(rank, size)
    return Layout(dim, sections, group)


def test_a_rank_has_its_heads_of_queries_keys_and_values() -> None:
    rows = torch.arange(8)  # four rows of queries, two of keys, two of values
    assert make_layout(0, (4, 2, 2)).take(rows).tolist() == [0, 1, 4, 6]
    second = make_layout(0, (4, 2, 2), rank=1)
    assert second.take(rows).tolist() == [2, 3, 5, 7]
    assert second.list_spans() == [Span(2, 0, 2), Span(5, 2, 1), Span(7, 3, 1)]


@pytest.mark.parametrize(("dim", "sections"), [(0, (6,)), (0, (6, 3, 3)), (1, (12,)), (2, (3, 9))])
@pytest.mark.parametrize("size", [1, 3])
def test_shares_make_up_the_whole(dim: int, sections: tuple[int, ...], size: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = sum(sections)
    whole = torch.randn(shape)
    layouts = [make_layout(dim, sections, rank, size) for rank in range(size)]
    shares = [layout.take(whole) for layout in layouts]
    assert all(layout.splits(share) for layout, share in zip(layouts, shares, strict=True))
    assert torch.equal(layouts[0].join(shares), whole)


def test_state_of_an_optimizer_is_split_as_its_parameter_but_for_scalars() -> None:
    layouts = {"blocks.0.mlp.up.weight": make_layout(0, (8,))}
    layout = find_layout("blocks.0.mlp.up.weight/exp_avg", layouts)
    assert layout is layouts["blocks.0.mlp.up.weight"]
    assert layout.splits(torch.zeros(4, 3))
    assert not layout.splits(torch.zeros(()))
    assert find_layout("final_norm.weight/exp_avg", layouts) is None
