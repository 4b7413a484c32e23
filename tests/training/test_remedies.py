"""Remedies name what applies to a run, with its own values, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_config, make_shards, plan_for

from gptmill.config.run import PrecisionName, RunConfig
from gptmill.data.shards.opening import TokenShards
from gptmill.training.plan import TrainPlan
from gptmill.training.remedies import advise_on_divergence, advise_on_speed


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def make_run(shards: TokenShards, **fields: object) -> tuple[RunConfig, TrainPlan]:
    config = make_config(run_name="mine", **fields)
    return config, plan_for(config, shards)


def test_a_run_that_diverges_hears_what_it_can_change(shards: TokenShards) -> None:
    config, plan = make_run(shards, max_lr=6e-4, warmup_steps=20, grad_clip=None, guard="warn")
    said = advise_on_divergence(config, replace(plan, precision="fp16"), 30)
    assert "--max_lr 0.0002 (it is 0.0006), --warmup_steps 40 (it is 20), --grad_clip 1 (it is off)" in said
    assert "--precision bf16 (fp16 overflows above 65,504)" in said
    assert "--guard rollback, which skips the data of a spike (it is warn)" in said
    assert "gptmill data show --run mine --step 29" in said


def test_what_is_set_well_is_not_proposed(shards: TokenShards) -> None:
    config, plan = make_run(shards, warmup_steps=10, max_steps=500)
    said = advise_on_divergence(config, replace(plan, precision="bf16"), 400)
    assert "--max_lr" in said
    assert not any(flag in said for flag in ("--warmup_steps", "--grad_clip", "--precision", "--guard rollback"))
    assert said.endswith("or go on with --guard warn")


@pytest.mark.parametrize(
    ("bad_alone", "precision", "backend", "expected"),
    [
        (True, "bf16", "auto", True),
        (False, "bf16", "auto", False),
        (True, "fp32", "auto", False),  # in which neither cuDNN nor flash attention runs
        (True, "bf16", "efficient", False),
    ],
)
def test_cudnn_attention_is_suspected_where_only_its_gradients_are_bad(
    shards: TokenShards, bad_alone: bool, precision: PrecisionName, backend: str, expected: bool
) -> None:
    config, plan = make_run(shards, attention_backend=backend)
    said = advise_on_divergence(config, replace(plan, precision=precision), 9, has_bad_gradients_only=bad_alone)
    assert ("--attention_backend flash (" in said) == expected


def test_a_slow_run_hears_of_small_batches_compilation_and_precision(shards: TokenShards) -> None:
    config, plan = make_run(shards)
    said = advise_on_speed(config, plan)
    assert "raise --mini_batch_size: micro-batches of 4 windows, 64 tokens, are small" in said
    assert "add --compile, which is off" in said
    assert "use --precision bf16 (it is fp32)" in said
    machine, training = replace(config.machine, compile=True), replace(config.training, mini_batch_size=4096)
    fast = replace(config, machine=machine, training=training)
    assert advise_on_speed(fast, replace(plan, precision="bf16")) == "let gptmill tune find the fastest settings"
    single, plan = make_run(shards, mini_batch_size=8)
    assert "--mini_batch_size and --total_batch_size (it is 128)" in advise_on_speed(single, plan)
