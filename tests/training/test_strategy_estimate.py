"""Strategies of several GPUs: their memory, what they send, what of it shows, and the choice between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.recipes import make_config
from gptmill.config.run import ParallelName, RunConfig
from gptmill.config.sizes import load_size
from gptmill.models.parameters import count_parameters
from gptmill.runtime.gpu_catalog import find_gpu
from gptmill.runtime.interconnects import Interconnect, find_interconnect
from gptmill.training.communication import Collective, StepCommunication, plan_communication
from gptmill.training.plan import CorpusSize, MachineRate, TrainPlan, derive_plan
from gptmill.training.run_counts import count_run
from gptmill.training.strategy_estimate import PlannedCluster, StrategyEstimate, choose_estimate, estimate_strategies
from gptmill.training.strategy_memory import ShardedUnits, build_units, estimate_strategy_memory
from gptmill.training.time_estimate import estimate_time

GPT2_VOCAB = 50_257
MODEL = ShardedUnits({"token_embedding.weight": (100, 8), "blocks.0.a": (64, 8), "blocks.1.a": (64, 8), "norm": (8,)})


def plan_on(config: RunConfig, links: Interconnect, gpu: str = "H100") -> TrainPlan:
    found = find_gpu(gpu)
    rate = MachineRate(links.gpus, "bf16", found.has_kernels, found.find_peak_rate("bf16"))
    return derive_plan(config, CorpusSize(GPT2_VOCAB, 10**6, config.training.mini_batch_size, 0), rate)


def estimate(network: str = "infiniband", gpu: str = "H100", **flags: Any) -> dict[ParallelName, StrategyEstimate]:
    config, links = make_config("gpt2-1.5b", {"num_epochs": 1, **flags}), find_interconnect(gpu, 64, 8, network)
    plan = plan_on(config, links, gpu)
    units = build_units(config, plan)
    counts = count_run(config, plan, count_parameters(config.model, plan.padded_vocab_size))
    alone = estimate_time(config, plan, counts)
    found = estimate_strategies(config, plan, units, PlannedCluster(links, find_gpu(gpu).memory_bytes, alone))
    return {each.strategy: each for each in found}


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_gather", 750), ("reduce_scatter", 750), ("all_reduce", 1500)], ids=lambda value: str(value)
)
def test_a_ring_sends_all_but_ones_own_part_and_an_all_reduce_does_so_twice(kind: Any, sent: float) -> None:
    collective = Collective(kind, 1000, ranks=4, rate=1e3, latency=0.5, calls=3)
    assert collective.sent_bytes == sent
    trips = sent / 750
    assert collective.seconds == pytest.approx(sent / 800 + trips * 3 * 0.5)


def test_what_the_computation_hides_does_not_show() -> None:
    def seconds(size: float) -> Collective:
        return Collective("all_gather", size, ranks=2, rate=1 / 1.6, latency=0.0)  # seconds by the size

    assert seconds(3).seconds == pytest.approx(3)
    hidden = StepCommunication(forward=(seconds(1),), backward=(seconds(2),), last_backward=(seconds(2),))
    assert hidden.count_exposed_seconds(12.0, micro_batches=2) == 0
    assert hidden.count_seconds(2) == pytest.approx(2 * 3 + 2)
    assert hidden.count_exposed_seconds(6.0, micro_batches=2) == pytest.approx(2)  # of the last backward pass
    ends = replace(hidden, ends=(seconds(0.5),), after=(seconds(4),))
    assert ends.count_exposed_seconds(120.0, micro_batches=2) == pytest.approx(2 * 0.5 + 4)
    assert hidden.count_sent("all_gather", 2) == pytest.approx(hidden.count_seconds(2) * 0.8 / 1.6)


def test_each_strategy_sends_what_it_shares() -> None:
    links = find_interconnect("H100", 8, 2, "infiniband")
    total, root = MODEL.total, MODEL.root
    assert (total, root, MODEL.block, MODEL.num_blocks) == (1832, 808, 512, 2)

    def sent(strategy: ParallelName, micro_batches: int = 3, **options: bool) -> list[float]:
        found = plan_communication(strategy, MODEL, 2, links, **options)
        return [found.count_sent(kind, micro_batches) for kind in ("all_reduce", "reduce_scatter", "all_gather")]

    ring = 7 / 8
    assert sent("ddp") == pytest.approx([2 * ring * 4 * total, 0, 0])
    assert sent("zero1") == pytest.approx([0, ring * 4 * total, ring * 4 * total])
    gathered = 3 * (2 * total - root) * 2
    assert sent("fsdp") == pytest.approx([0, 3 * ring * 4 * total, ring * gathered])
    assert sent("fsdp", holds_gradients=True) == pytest.approx([0, ring * 4 * total, ring * gathered])
    across = 2 * (1 / 2) * 4 * total / 4
    assert sent("hsdp", holds_gradients=True) == pytest.approx([across, 3 / 4 * 4 * total, 3 / 4 * gathered])
    assert sent("hsdp")[0] == pytest.approx(3 * across)


def test_memory_is_that_of_the_rank_that_holds_most() -> None:
    """Ten experts on 16 ranks cannot be divided any further: ten ranks have one each."""
    experts = ShardedUnits({"blocks.0.experts": (10, 4, 4), "blocks.0.router": (10, 4)})
    assert experts.count_shard(16) == 4 * 4 + 4
    assert experts.count_shard(4) == 3 * (16 + 4)
    assert experts.count_owned(4) == 160
    assert MODEL.count_shard(1) == MODEL.total


def test_sharding_divides_weights_gradients_and_optimizer_state() -> None:
    links = find_interconnect("H100", 64, 8, "infiniband")
    config = make_config("gpt2-1.5b", {"mini_batch_size": 8, "ema_decay": 0.999})
    plan = plan_on(config, links)
    units = build_units(config, plan)
    ddp, zero1, fsdp = (estimate_strategy_memory(name, config, plan, units, 64) for name in ("ddp", "zero1", "fsdp"))
    parameters = plan.parameters
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (4 * parameters, 4 * parameters, 12 * parameters)
    assert (fsdp.weights, fsdp.gradients) == (parameters // 16, parameters // 16)
    assert fsdp.optimizer == 12 * parameters // 64
    assert zero1.weights == ddp.weights
    assert 4 * parameters < zero1.optimizer < 5 * parameters  # the average is whole on every rank
    assert {each.activations for each in (ddp, zero1, fsdp)} == {ddp.activations}
    assert ddp.total > zero1.total > fsdp.total
    held = estimate_strategy_memory("fsdp", config, plan, units, 64, holds_gradients=True)
    assert held.buffers - fsdp.buffers == 4 * (units.total - units.block)


def test_a_model_that_fits_every_gpu_is_replicated_where_the_network_is_fast() -> None:
    found = estimate(mini_batch_size=8)
    assert choose_estimate(list(found.values())).strategy == "ddp"
    assert all(each.fits for each in found.values())
    assert found["ddp"].time is not None
    assert found["ddp"].time.exposed_seconds < 0.01 * found["ddp"].time.compute_seconds


def test_where_it_is_slow_gradients_are_summed_inside_the_machines_first() -> None:
    found = estimate("ethernet", mini_batch_size=8)
    assert choose_estimate(list(found.values())).strategy == "hsdp"


def test_70b_parameters_fit_sharded_over_all_gpus_only() -> None:
    flags = {**load_size("llama-70b"), "total_batch_size": 2**21, "mini_batch_size": 1}
    found = estimate(**flags, gradient_checkpointing="full")
    assert {name for name, each in found.items() if each.fits} == {"fsdp"}
    assert choose_estimate(list(found.values())).strategy == "fsdp"
    assert choose_estimate(list(found.values()), "ddp").strategy == "ddp"
    small = estimate(gpu="RTX 4090", **flags, gradient_checkpointing="full")
    assert not any(each.fits for each in small.values())
    assert choose_estimate(list(small.values())).strategy == "fsdp"


def test_gradients_are_summed_once_a_step_where_there_is_memory_for_them() -> None:
    by_gpu = {gpu: estimate(gpu=gpu, mini_batch_size=2)["fsdp"] for gpu in ("H100", "RTX 3060")}
    parameters = 1_557_686_400
    once = 63 / 64 * 4 * parameters
    assert by_gpu["H100"].sent_bytes["reduce_scatter"] == pytest.approx(once)
    assert by_gpu["RTX 3060"].sent_bytes["reduce_scatter"] == pytest.approx(4 * once)
    assert by_gpu["RTX 3060"].memory.total < by_gpu["H100"].memory.total


def test_one_machine_has_no_hybrid() -> None:
    config, links = make_config("gpt2-124m", {}), find_interconnect("H100", 8, 1, "infiniband")
    plan = plan_on(config, links)
    found = estimate_strategies(config, plan, build_units(config, plan), PlannedCluster(links, None, None))
    assert [each.strategy for each in found] == ["ddp", "zero1", "fsdp"]
    assert {each.fits for each in found} == {None}
    assert {each.time for each in found} == {None}
    assert choose_estimate(found).strategy == "ddp"


def test_an_optimizer_whose_state_cannot_be_split_is_not_sharded() -> None:
    assert list(estimate(mini_batch_size=8, optimizer="adamw8bit")) == ["ddp", "zero1"]
