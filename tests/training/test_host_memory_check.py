"""A run that the system would kill for its memory is refused, with its own numbers and what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CPU, make_config, make_shards, open_tiny, plan_for

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.run import RunConfig
from gptmill.data.shards.opening import TokenShards
from gptmill.runtime.world import World
from gptmill.training.dry_run import dry_run
from gptmill.training.host_memory_check import (
    USABLE_SHARE,
    check_activations_fit,
    check_state_fits,
    count_host_needs,
)
from gptmill.training.plan import TrainPlan

LARGE = {"num_layers": 8, "embd_size": 512, "num_heads": 8, "context_length": 512, "eval_tokens": 512}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def make_large(shards: TokenShards, **fields: object) -> tuple[RunConfig, TrainPlan]:
    config = make_config(**{**LARGE, "mini_batch_size": 16, "total_batch_size": 8192, **fields})
    return config, plan_for(config, shards)


def refuse(config: RunConfig, plan: TrainPlan, room: int) -> str:
    with pytest.raises(UserError) as caught:
        check_activations_fit(config, plan, CPU, room, lambda: pytest.fail("an estimate is enough"))
    return str(caught.value)


def test_activations_that_do_not_fit_are_told_with_a_micro_batch_that_does(shards: TokenShards) -> None:
    config, plan = make_large(shards)
    room = int(count_host_needs(config, plan, CPU).total / USABLE_SHARE) + 1
    check_activations_fit(config, plan, CPU, room, lambda: None)
    said = refuse(config, plan, room // 2)
    assert "out of memory on cpu: one micro-batch of mini_batch_size 16 x context_length 512 does not fit" in said
    assert f"but {room // 2 / 1e9:.1f} GB are available" in said
    found = re.search(r"--mini_batch_size (\d+) would fit", said)
    assert found
    smaller, plan = make_large(shards, mini_batch_size=int(found[1]))
    check_activations_fit(smaller, plan, CPU, room // 2, lambda: None)


def test_where_no_micro_batch_fits_activations_are_computed_again_or_the_window_is_too_long(
    shards: TokenShards,
) -> None:
    config, plan = make_large(shards, mini_batch_size=1)
    full = count_host_needs(config, plan, CPU, recompute="full")
    assert "; --gradient_checkpointing full would fit" in refuse(config, plan, int(full.total / USABLE_SHARE) + 1)
    assert "not even a single window would fit" in refuse(config, plan, full.total // 2)


def test_a_state_that_does_not_fit_is_refused_before_it_is_built(shards: TokenShards) -> None:
    config, plan = make_large(shards)
    needs = count_host_needs(config, plan, CPU)
    room = int((needs.state + needs.copies) / USABLE_SHARE) + 1
    check_state_fits(config, plan, CPU, room)
    with pytest.raises(UserError, match=f"of {plan.parameters:,} parameters .* use --guard warn, which keeps one copy"):
        check_state_fits(config, plan, CPU, room - needs.copies // 4)
    check_state_fits(replace(config, guard=replace(config.guard, guard="warn")), plan, CPU, room - needs.copies // 4)
    with pytest.raises(UserError, match=r"the model and its optimizer do not fit.* use a smaller model"):
        check_state_fits(config, plan, CPU, needs.state // 2)


def test_logits_take_twice_their_memory_where_freed_blocks_are_kept(shards: TokenShards) -> None:
    """Of GPT-2's vocabulary: three blocks of them were measured to take the memory of five, or of six."""
    config, plan = make_large(shards, num_layers=1, embd_size=32, mini_batch_size=2)
    assert plan.memory is not None
    kept, mapped = (count_host_needs(config, plan, CPU, maps_large_blocks=maps) for maps in (False, True))
    assert kept.activations - mapped.activations == plan.memory.logits > 0


def test_on_a_gpu_the_host_holds_the_fresh_weights_only(shards: TokenShards) -> None:
    config, plan = make_large(shards)
    gpu, weights = World(0, 1, torch.device("cuda")), 4 * plan.parameters
    check_state_fits(config, plan, gpu, int(weights / USABLE_SHARE) + 1)
    check_activations_fit(config, plan, gpu, 1, lambda: pytest.fail("not in host memory"))
    with pytest.raises(UserError, match="out of memory on cuda"):
        check_state_fits(config, plan, gpu, weights)


def test_a_window_of_a_plug_ins_model_is_measured_not_estimated(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = make_large(shards)
    gradients, room = 4 * plan.parameters, 10**10
    monkeypatch.setattr(ModelConfig, "own_parts", ("attention",))
    check_activations_fit(config, plan, CPU, room, lambda: gradients + 10**6)
    check_activations_fit(config, plan, CPU, room, lambda: None)
    with pytest.raises(UserError, match=r"activations take 16\.\d GB \(by the measure of one window\)"):
        check_activations_fit(config, plan, CPU, room, lambda: gradients + 10**9)


@pytest.mark.parametrize("room", [None, 10**12])
def test_a_system_with_room_or_that_does_not_tell_refuses_nothing(shards: TokenShards, room: int | None) -> None:
    config, plan = make_large(shards)
    check_state_fits(config, plan, CPU, room)
    check_activations_fit(config, plan, CPU, room, lambda: pytest.fail("an estimate is enough"))


def test_the_dry_run_refuses_before_it_runs(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = open_tiny(shards)
    monkeypatch.setattr(type(tiny.state.model), "forward", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UserError, match="one micro-batch of mini_batch_size 4 x context_length 16 does not fit"):
        dry_run(tiny.state, tiny.config, tiny.plan, CPU, host_room=1000)
