"""Ranks are arranged by strategy: all of them in one row of shards, or one row per machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptmill.config.errors import UserError
from gptmill.runtime.parallel.mesh import REPLICATE, SHARD, arrange_ranks, find_shards, read_local_size
from gptmill.runtime.world import World

SIXTH = World(5, 8, torch.device("cpu"))


@pytest.fixture
def _eight_ranks() -> Iterator[None]:
    """This process as the sixth of eight that do not exist."""
    dist.init_process_group("fake", rank=SIXTH.rank, world_size=SIXTH.size, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_eight_ranks")
def test_shards_are_within_a_machine_and_copies_across(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = arrange_ranks(SIXTH, "hsdp")
    assert (shared.axis_size(REPLICATE), shared.axis_size(SHARD)) == (2, 4)
    assert shared.mesh is not None
    assert (shared.mesh.get_local_rank(REPLICATE), shared.mesh.get_local_rank(SHARD)) == (1, 1)
    assert (shared.data_rank, shared.data_size) == (5, 8)
    alone = arrange_ranks(SIXTH, "fsdp")
    assert (alone.axis_size(REPLICATE), alone.axis_size(SHARD)) == (1, 8)
    assert (alone.data_rank, alone.data_size) == (5, 8)
    assert alone.shards_weights


@pytest.mark.usefixtures("_eight_ranks")
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_ranks_with_whole_models_need_no_mesh(strategy: str) -> None:
    world = arrange_ranks(SIXTH, strategy)  # type: ignore[arg-type]
    assert world.mesh is None
    assert not world.shards_weights
    assert (world.data_rank, world.data_size, world.axis_size(SHARD)) == (5, 8, 1)


def test_without_a_process_group_nothing_changes() -> None:
    one = World(0, 1, torch.device("cpu"))
    assert arrange_ranks(one, "fsdp") is one


def test_machines_of_different_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"8 ranks are not a multiple of the 3 on this one.*--parallel fsdp"):
        find_shards(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    assert read_local_size(8) == 8
