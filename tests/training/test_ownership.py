"""Which rank owns which parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.models.gpt import build_gpt
from gptmill.runtime.world import World
from gptmill.training.optimizers.ownership import Ownership, assign_owners, flatten, split_flat

CPU = torch.device("cpu")


def test_ranks_own_about_equally_much() -> None:
    model = build_gpt(ModelConfig(num_layers=6, embd_size=64, num_heads=2, context_length=16), 128, 0)
    sizes = [parameter.numel() for parameter in model.parameters()]
    for ranks in (1, 2, 3, 4, 8):
        loads = [0] * ranks
        for size, owner in zip(sizes, assign_owners(sizes, ranks), strict=True):
            loads[owner] += size
        assert max(loads) <= 1.1 * sum(sizes) / ranks


def test_more_ranks_than_parameters_leave_some_without() -> None:
    assert assign_owners([5, 7], 4) == [1, 0]


def test_frozen_parameters_have_no_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    owned = [Ownership(model, World(rank, 2, CPU)).own for rank in range(2)]
    assert sorted(map(id, [*owned[0], *owned[1]])) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_parameters_of_two_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(UserError, match="dtypes"):
        Ownership(model, World(0, 2, CPU))


def test_a_flat_vector_splits_into_what_it_was_made_of() -> None:
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(4)]
    for tensor, part in zip(tensors, split_flat(flatten(tensors), tensors), strict=True):
        assert part.equal(tensor)
