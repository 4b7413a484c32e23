"""The warnings of a plan, on the contradictions that gptmill was founded on, and on runs that have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.recipes import list_recipes, make_config
from gptmill.config.run import PrecisionName, RunConfig
from gptmill.models.parameters import count_parameters
from gptmill.runtime.gpu_catalog import find_gpu
from gptmill.training.plan import CorpusSize, MachineRate, TrainPlan, derive_plan
from gptmill.training.plan_checks import PlannedRun, find_plan_warnings, find_usual_lr, format_count
from gptmill.training.run_counts import RunCounts, count_multiples, count_run
from gptmill.training.schedules import make_lr
from gptmill.training.time_estimate import TimeEstimate, assume_mfu, estimate_time

GPT2_VOCAB = 50_257
FP32: PrecisionName = "fp32"


def plan_for(config: RunConfig, tokens: float = 1e9, gpu: str | None = None, ranks: int = 1) -> TrainPlan:
    found = find_gpu(gpu or "H200")
    precision = found.choose_precision(config.machine.precision)
    rate = MachineRate(ranks, precision, found.has_kernels, found.find_peak_rate(precision))
    windows = int(tokens) // config.model.context_length
    return derive_plan(config, CorpusSize(GPT2_VOCAB, windows, config.training.mini_batch_size, 0), rate)


def find(config: RunConfig, **facts: Any) -> dict[str, str]:
    tokens = facts.get("corpus_tokens") or 1e9
    run = PlannedRun(config, plan_for(config, tokens), corpus_name="corpus", **facts)
    return {warning.about: warning.message for warning in find_plan_warnings(run)}


def test_105_billion_tokens_of_a_corpus_of_12_8_are_noticed() -> None:
    """100,000 steps of 512 x 2,048 tokens, which were to be one pass over 12.8 B."""
    config = make_config("custom-300m", {"mini_batch_size": 128})
    found = find(config, corpus_tokens=12_800_000_000)
    assert set(found) == {"epochs"}
    assert "100,000 steps of 1,048,576 tokens are 104.9 B tokens, 8.2 epochs of the 12.8 B" in found["epochs"]
    assert "--max_steps 48828 for 4 epochs" in found["epochs"]
    planned = replace(config, training=replace(config.training, max_steps=12_207))
    assert find(planned, corpus_tokens=12_800_000_000) == {}


def test_micro_batches_of_128_windows_do_not_fit_the_gpus_that_they_were_planned_for() -> None:
    """128 x 2,048 tokens per A100 of 40 GB, in fp16."""
    config = make_config("custom-300m", {"mini_batch_size": 128, "precision": "fp16"})
    plan, gpu = plan_for(config, gpu="A100", ranks=4), find_gpu("A100")
    assert plan.memory is not None
    facts = {"device_name": gpu.name, "device_memory_bytes": gpu.memory_bytes, "has_kernels": gpu.has_kernels}
    run = PlannedRun(config, plan, needed_memory_bytes=plan.memory.total, **facts)  # type: ignore[arg-type]
    (message,) = [warning.message for warning in find_plan_warnings(run) if warning.about == "memory"]
    assert "A100 SXM4 has 39.6 GiB" in message
    assert "--mini_batch_size 8 would fit" in message
    smaller = make_config("custom-300m", {"mini_batch_size": 8, "precision": "fp16"})
    fitting = plan_for(smaller, gpu="A100", ranks=4)
    assert fitting.memory is not None
    run = PlannedRun(smaller, fitting, needed_memory_bytes=fitting.memory.total, **facts)  # type: ignore[arg-type]
    assert "memory" not in [warning.about for warning in find_plan_warnings(run)]


@pytest.mark.parametrize(
    ("gpu", "rows", "context", "width", "layers", "fits"),
    [
        ("RTX 4090", 256, 512, 1024, 24, False),
        ("A100 80GB", 256, 512, 1024, 24, False),
        ("RTX 3080", 128, 256, 768, 12, False),
        ("RTX 4090", 128, 256, 768, 12, True),
        ("RTX 3060", 64, 256, 512, 8, True),
    ],
    ids=["large-4090", "large-a100", "middle-3080", "middle-4090", "small-3060"],
)
def test_the_recommended_batches_are_held_against_the_memory_of_the_gpu(
    gpu: str, rows: int, context: int, width: int, layers: int, *, fits: bool
) -> None:
    """The table of recommended sizes by GPU: batches of a micro-batch that fill more than its memory are noticed."""
    sizes = {"mini_batch_size": rows, "context_length": context, "embd_size": width, "num_layers": layers}
    config = make_config(None, {**sizes, "num_heads": width // 64, "total_batch_size": rows * context})
    plan, found = plan_for(config, gpu=gpu), find_gpu(gpu)
    assert plan.memory is not None
    run = PlannedRun(
        config, plan, needed_memory_bytes=plan.memory.total, device_name=gpu, device_memory_bytes=found.memory_bytes
    )
    assert ("memory" not in [warning.about for warning in find_plan_warnings(run)]) == fits


def test_the_table_of_model_sizes_and_that_of_learning_rates() -> None:
    """124M to 1.5B are right; of the rates, those after step 50,000 and 90,000 are not what the schedule does."""
    named = {"gpt2-124m": 124e6, "gpt2-350m": 350e6, "gpt2-774m": 774e6, "gpt2-1.5b": 1.5e9}
    for recipe, size in named.items():
        total = count_parameters(make_config(recipe, {}).model, GPT2_VOCAB).total
        assert total == pytest.approx(size, rel=0.05)
    config = make_config("gpt2-124m", {"max_lr": 6e-4, "min_lr": 6e-5}).optimizer
    rates = {step: make_lr(step, config, 95_365) for step in (0, 714, 50_000, 90_000)}
    assert rates[0] == pytest.approx(8.4e-7, rel=0.01)
    assert rates[714] == pytest.approx(6e-4)
    assert rates[50_000] == pytest.approx(3.1e-4, rel=0.01)  # not 4e-4
    assert rates[90_000] == pytest.approx(6.4e-5, rel=0.01)  # not 1e-4


def test_steps_per_epoch_that_are_not_a_pass_over_the_corpus() -> None:
    config = make_config("gpt2-124m", {"num_epochs": 1})
    assert find(config, corpus_tokens=10_000_000_000) == {}
    found = find(config, corpus_tokens=5_000_000_000)
    assert "makes an epoch of 10.0 B tokens, but corpus has 5.0 B, 9,537 steps" in found["steps_per_epoch"]


def test_warm_up_longer_than_the_run_or_most_of_it() -> None:
    assert "ends within warmup_steps 715" in find(make_config("gpt2-124m", {"max_steps": 500}))["schedule"]
    found = find(make_config("gpt2-124m", {"max_steps": 2000}))["schedule"]
    assert "715 are 36% of the 2,000 steps" in found
    assert "--warmup_steps 100" in found
    assert "schedule" not in find(make_config("gpt2-124m", {"max_steps": 5000}))


def test_usual_learning_rates_are_the_published_ones_and_interpolated() -> None:
    assert find_usual_lr(125e6) == pytest.approx(6e-4)
    assert find_usual_lr(2.7e9) == pytest.approx(1.6e-4)
    assert 3e-4 < find_usual_lr(200e6) < 6e-4
    assert find_usual_lr(1e15) == pytest.approx(0.6e-4)
    assert find_usual_lr(10.0) == pytest.approx(2.5e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_lr": 1e-2}, "max_lr 0.01 is outside of the usual band of adamw for 124.5 M parameters, 0.0001 to 0.003"),
        ({"max_lr": 1e-5, "min_lr": 1e-6}, "--max_lr 0.0006 is common"),
        ({"optimizer": "lion", "max_lr": 1e-3}, "of lion"),
        ({"optimizer": "muon", "matrix_lr": 0.5}, "matrix_lr 0.5 is outside of Muon's usual band"),
        ({"optimizer": "muon", "max_lr": 1e-2}, ""),
        ({"max_lr": 1e-5, "min_lr": 1e-6, "init_from": "runs/first"}, ""),
    ],
    ids=["high", "low", "lion", "muon", "muon-others", "continued"],
)
def test_learning_rates_out_of_the_usual_band(flags: dict[str, Any], words: str) -> None:
    found = find(make_config("gpt2-124m", {"max_steps": 20_000, **flags})).get("learning_rate", "")
    assert words in found
    assert bool(words) == bool(found)


def test_a_shipped_recipe_has_a_usual_learning_rate_and_warm_up() -> None:
    for recipe in list_recipes():
        config = make_config(recipe, {})
        if config.training.max_steps or config.training.steps_per_epoch:
            assert not find(config).keys() & {"learning_rate", "schedule"}, recipe


def test_documents_shorter_than_the_context_unless_they_are_masked() -> None:
    config = make_config("gpt2-124m", {"max_steps": 20_000})
    assert "spans about 10 documents" in find(config, median_document_tokens=100)["documents"]
    assert "documents" not in find(config, median_document_tokens=600)
    masked = make_config("gpt2-124m", {"max_steps": 20_000, "documents": "masked"})
    assert "documents" not in find(masked, median_document_tokens=100)


def test_a_batch_larger_than_the_corpus_and_too_few_tokens_for_the_model() -> None:
    found = find(make_config("gpt2-124m", {"max_steps": 20, "warmup_steps": 1}), corpus_tokens=300_000)
    assert "524,288 tokens is more than the whole corpus of 300,000" in found["batch"]
    assert "10.5 M tokens for 124.5 M parameters are 0.084 per parameter" in found["tokens"]


def make_counts(config: RunConfig) -> RunCounts:
    plan = plan_for(config)
    return count_run(config, plan, count_parameters(config.model, plan.padded_vocab_size))


def test_disk_that_is_too_small_and_time_that_is_not_spent_on_training() -> None:
    config = make_config("gpt2-124m", {"max_steps": 20_000, "warmup_steps": 700})
    counts = make_counts(config)
    assert counts.checkpoint_bytes == pytest.approx(1.49e9, rel=0.01)  # as measured on an H200
    found = find(config, counts=counts, free_disk_bytes=5_000_000_000)
    assert "enough for 3; lower --keep_checkpoints" in found["disk"]
    slow = TimeEstimate(100.0, 50.0, 20.0, 0.0, 1.0, None, "")
    found = find(config, counts=counts, time=slow)
    assert "81 evaluations take 29% of the time; --eval_freq 1500" in found["evaluation"]
    assert "81 checkpoints take 12% of the time; --checkpoint_freq 3000" in found["checkpoints"]
    assert find(config, counts=counts, free_disk_bytes=10**12, time=replace(slow, evaluation=1, checkpoints=1)) == {}


def test_saves_and_kept_checkpoints_are_counted_by_tier() -> None:
    flags = {"max_steps": 1000, "eval_freq": 100, "checkpoint_freq": 30, "keep_checkpoints": 3, "milestone_freq": 500}
    counts = make_counts(make_config("gpt2-124m", flags))
    every = {step for step in range(1, 1001) if step % 100 == 0 or step % 30 == 0 or step == 1000}
    assert counts.saves == len(every)
    assert counts.evaluations == 11
    assert counts.kept_checkpoints == 3 + 2 + 2 + 1
    assert count_multiples([4, 6], 24) == len({step for step in range(1, 25) if step % 4 == 0 or step % 6 == 0})


def test_a_named_gpu_gives_the_time_that_was_measured_on_it() -> None:
    """books-124m took 270 s on an H200, from process start to exit."""
    config = make_config("books-124m", {})
    plan = plan_for(config)
    found = estimate_time(config, plan, make_counts(config))
    assert found is not None
    assert found.total == pytest.approx(270, rel=0.1)
    assert assume_mfu(config, plan)[0] == pytest.approx(0.52, abs=0.005)
    given = estimate_time(config, plan, make_counts(config), mfu=0.26)
    assert given is not None
    assert given.training == pytest.approx(2 * found.training, rel=0.01)


def test_flops_follow_both_warm_ups() -> None:
    flags = {"max_steps": 100, "batch_size_warmup": "262144:20", "context_warmup": "256:50", "warmup_steps": 1}
    plan = plan_for(make_config("gpt2-124m", flags))
    short, long = plan.stage_flops[0], plan.flops_per_token
    assert plan.count_flops() == pytest.approx(262_144 * 20 * short + 524_288 * (30 * short + 50 * long))
    assert plan.count_tokens() == 262_144 * 20 + 524_288 * 80


def test_counts_are_written_with_a_unit() -> None:
    assert [format_count(number) for number in (1536, 303_219_712, 104.8576e9)] == ["1,536", "303.2 M", "104.9 B"]
