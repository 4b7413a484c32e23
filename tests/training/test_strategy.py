"""--parallel auto takes the cheapest strategy that fits, and what cannot be sharded is refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import CPU, make_config, make_shards, plan_for

from gptmill.config.run import ParallelName, RunConfig
from gptmill.config.validation import find_problems
from gptmill.data.shards.opening import TokenShards
from gptmill.runtime.world import World
from gptmill.training import strategy
from gptmill.training.plan import TrainPlan
from gptmill.training.strategy import USABLE_SHARE, can_hold_gradients, choose_strategy, find_cheapest
from gptmill.training.strategy_memory import build_units, estimate_strategy_memory

FOUR = World(0, 4, torch.device("cpu"))


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def estimate(name: ParallelName, config: RunConfig, plan: TrainPlan, *, holds_gradients: bool = False) -> int:
    units = build_units(config, plan)
    return estimate_strategy_memory(name, config, plan, units, 4, holds_gradients=holds_gradients).total


@pytest.mark.usefixtures("_group")
def test_auto_takes_the_first_strategy_that_fits(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_layers=12, embd_size=64)
    plan = plan_for(config, shards)
    ddp, zero1 = estimate("ddp", config, plan), estimate("zero1", config, plan)
    assert estimate("fsdp", config, plan) < zero1 < ddp
    for usable, chosen in ((ddp + 1, "ddp"), (ddp - 1, "zero1"), (zero1 - 1, "fsdp"), (1, "fsdp")):
        monkeypatch.setattr(strategy, "read_rank_memory", lambda _world, usable=usable: usable / USABLE_SHARE + 1e-3)
        assert find_cheapest(config, plan, FOUR) == chosen
    monkeypatch.setattr(strategy, "read_rank_memory", lambda _world: 1)
    assert find_cheapest(make_config(optimizer="adamw8bit"), plan, FOUR) == "zero1"


@pytest.mark.usefixtures("_group")
def test_what_is_asked_for_is_taken(shards: TokenShards) -> None:
    def refuse() -> TrainPlan:
        raise AssertionError("no estimate is needed")

    for wanted in ("ddp", "zero1", "fsdp", "hsdp"):
        assert choose_strategy(make_config(parallel=wanted), FOUR, refuse) == wanted
    assert choose_strategy(make_config(exact_ranks=True), FOUR, refuse) == "zero1"
    assert choose_strategy(make_config(), CPU, refuse) == "ddp"
    config = make_config()
    assert choose_strategy(config, FOUR, lambda: plan_for(config, shards)) == "ddp"  # it is tiny


def test_one_process_without_torchrun_is_the_plain_path() -> None:
    def refuse() -> TrainPlan:
        raise AssertionError("no estimate is needed")

    assert choose_strategy(make_config(parallel="fsdp"), CPU, refuse) == "ddp"


@pytest.mark.usefixtures("_group")
def test_whole_gradients_are_held_where_they_fit(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    config, world = make_config(embd_size=64), World(0, 1, torch.device("cpu"), strategy="fsdp")
    plan = plan_for(config, shards)
    units = build_units(config, plan)
    needed = estimate_strategy_memory("fsdp", config, plan, units, 1, holds_gradients=True).total
    for usable, is_held in ((needed + 1, True), (needed - 1, False)):
        monkeypatch.setattr(strategy, "read_rank_memory", lambda _world, usable=usable: usable / USABLE_SHARE)
        assert can_hold_gradients(config, plan, world) == is_held


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"parallel": "fsdp", "optimizer": "adamw8bit"}, "cannot shard the state of optimizer adamw8bit"),
        ({"parallel": "hsdp", "optimizer": "adamw8bit"}, "use --parallel zero1"),
        ({"parallel": "fsdp", "exact_ranks": True}, "remove one of them"),
    ],
    ids=["fsdp", "hsdp", "exact"],
)
def test_what_cannot_be_sharded_is_refused(fields: dict[str, object], says: str) -> None:
    (problem,) = find_problems(make_config(**fields))
    assert says in str(problem)
