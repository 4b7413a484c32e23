"""What cannot be split is refused in one sentence that says what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from gptmill.config.parallel_relations import count_data_ranks, shares_more_than_data
from gptmill.config.recipes import make_config
from gptmill.config.run import MachineConfig
from gptmill.config.validation import find_problems

MOE = {"feed_forward": "moe", "num_experts": 4}
REFUSED = [
    ({"tensor_parallel": 0}, "must be at least 1"),
    ({"tensor_parallel": 5}, "does not divide num_heads 12; use a divisor of it"),
    ({"tensor_parallel": 2, "num_kv_heads": 3}, "does not divide num_kv_heads 3; use a divisor of it"),
    ({"tensor_parallel": 2, "feed_forward": "gelu", "ffn_size": 33}, "does not divide ffn_size 33"),
    ({"tensor_parallel": 2, **MOE}, "splits dense models; use --expert_parallel"),
    ({"tensor_parallel": 2, "optimizer": "adamw8bit"}, "use --optimizer adamw, lion, muon"),
    ({"tensor_parallel": 2, "precision": "fp8"}, "has no fp8 GEMMs; use --precision bf16"),
    ({"tensor_parallel": 2, "histogram_freq": 10, "use_tensorboard": True}, "remove --histogram_freq"),
    ({"tensor_parallel": 2, "parallel": "fsdp"}, "use --parallel ddp in the place of fsdp"),
    ({"context_parallel": 2, **MOE}, "use --expert_parallel for a mixture of experts"),
    ({"context_parallel": 3}, "needs windows of a multiple of 6 tokens, not 1024"),
    ({"context_parallel": 4, "context_warmup": "4:100"}, "needs windows of a multiple of 8 tokens, not 4"),
    ({"context_parallel": 2, "documents": "whole"}, "use --documents packed or masked"),
    ({"context_parallel": 2, "precision": "fp8"}, "has no fp8 GEMMs"),
    ({"context_parallel": 2, "parallel": "zero1"}, "use --parallel ddp in the place of zero1"),
    ({"expert_parallel": 2}, "use --feed_forward moe, or --tensor_parallel for a dense model"),
    ({"expert_parallel": 3, **MOE}, "does not divide num_experts 4; use a divisor of it"),
    ({"expert_parallel": 2, **MOE, "optimizer": "adamw8bit"}, "use --optimizer adamw, lion, muon"),
    ({"tensor_parallel": 2, "exact_ranks": True}, "use --no_exact_ranks"),
]


def list_problems(flags: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in find_problems(make_config(None, flags))]


@pytest.mark.parametrize(("flags", "fix"), REFUSED, ids=[" ".join(flags) + " " + fix[:20] for flags, fix in REFUSED])
def test_it_is_refused_with_the_fix(flags: dict[str, Any], fix: str) -> None:
    (problem,) = list_problems(flags)
    assert fix in problem


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel": 4, "num_kv_heads": 4, "optimizer": "lion"},
        {"context_parallel": 4, "tensor_parallel": 2, "optimizer": "muon"},
        {"context_parallel": 2, "optimizer": "muon"},
        {"expert_parallel": 4, **MOE},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_it_is_allowed(flags: dict[str, Any]) -> None:
    assert list_problems(flags) == []


def test_ranks_that_share_layers_or_windows_read_the_same() -> None:
    machine = MachineConfig(tensor_parallel=2, context_parallel=2, expert_parallel=1)
    assert count_data_ranks(machine, 8) == 2
    assert count_data_ranks(machine, 1) == 1
    assert count_data_ranks(MachineConfig(expert_parallel=4), 8) == 8
    assert shares_more_than_data(machine)
    assert not shares_more_than_data(MachineConfig())
