"""Fake ranks hold what the plan says, and a plan that is wrong is noticed."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch.distributed as dist

import gptmill
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.training import strategy_memory

FLAGS = {"total_batch_size": 16 * 64 * 8, "mini_batch_size": 2, "corpus_tokens": 1e9, "progress": False}


def place(size: str, **flags: Any) -> gptmill.RunPlan:
    return gptmill.plan("gpt2-124m", size=size, gpu="h100", gpus=8, nodes=2, simulate=True, **FLAGS, **flags)


@pytest.mark.parametrize(
    ("size", "flags"),
    [("tiny-gpt2", {}), ("tiny-moe", {"optimizer": "muon", "ema_decay": 0.99})],
    ids=["adamw", "experts-muon-ema"],
)
def test_weights_gradients_and_optimizer_state_are_placed_as_planned(size: str, flags: dict[str, Any]) -> None:
    excepthook = sys.excepthook
    plan = place(size, **flags)
    assert [(each.strategy, each.ranks) for each in plan.placements] == [("zero1", 8), ("fsdp", 8), ("hsdp", 5)]
    for each in plan.placements:
        assert each.agrees, each
        assert each.placed.weights == each.planned.weights
    fsdp = plan.placements[1]
    assert fsdp.placed.weights < plan.plan.parameters
    if size == "tiny-moe":  # four experts on eight ranks cannot be divided: some ranks have none
        assert fsdp.least_total < 0.95 * fsdp.placed.total
    assert sys.excepthook is excepthook
    assert "LOCAL_WORLD_SIZE" not in os.environ
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("size", "flags", "ranks"),
    [
        ("tiny-llama", {"tensor_parallel": 2, "value_embeddings": 1, "ema_decay": 0.99}, 5),
        ("tiny-moe", {"expert_parallel": 4, "optimizer": "muon"}, 5),
    ],
    ids=["tensor", "experts-muon"],
)
def test_shares_of_layers_and_experts_are_placed_as_planned(size: str, flags: dict[str, Any], ranks: int) -> None:
    plan = place(size, **flags)
    (placement,) = plan.placements
    assert placement.ranks == ranks
    assert placement.placed.weights == placement.planned.weights
    assert placement.error < 1e-5  # step counts
    assert placement.placed.weights < 4 * plan.plan.parameters
    assert placement.least_total == placement.placed.total


def test_a_plan_that_differs_from_the_placement_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strategy_memory, "split_shape", lambda shape, ranks: (shape[0] / ranks, *shape[1:]))
    words = "plan gpt2-124m --size tiny-moe --gpu h100 --gpus 8 --simulate --total_batch_size 8192 --mini_batch_size 2"
    assert run_guarded([*words.split(), "--corpus_tokens", "1e9"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("the plan is wrong")]
    assert [line.split()[0] for line in lines] == ["fsdp"]


def test_what_cannot_be_simulated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="add their number and kind"):
        gptmill.plan("gpt2-124m", gpu="h100", simulate=True)
    with pytest.raises(UserError, match="name their kind"):
        gptmill.plan("gpt2-124m", device="cpu", gpus=2, simulate=True, corpus_tokens=1e9)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="run it without torchrun"):
        place("tiny-gpt2")
