"""What ranks that share layers, windows or experts hold and send, against the collectives that a step really calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptmill.config.recipes import make_config
from gptmill.config.run import RunConfig
from gptmill.experiments.fake_ranks import open_fake_rank
from gptmill.models.context_parallel_gpt import ContextParallelGPT, share_rows
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.losses import LossConfig
from gptmill.runtime.interconnects import Interconnect, find_interconnect
from gptmill.runtime.parallel.context_parallel import RankRows
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.parallel.split_model import split_model
from gptmill.runtime.world import CP
from gptmill.training.communication import RINGS, StepCommunication
from gptmill.training.plan import CorpusSize, MachineRate, TrainPlan, derive_plan
from gptmill.training.split_communication import plan_split_communication
from gptmill.training.split_memory import estimate_split_memory, split_units
from gptmill.training.strategy_memory import ShardedUnits, build_units

VOCAB = 128
SHAPE = {"num_layers": 2, "embd_size": 32, "num_heads": 4, "context_length": 16, "mini_batch_size": 2}
LLAMA = {"num_kv_heads": 2, "feed_forward": "swiglu", "positions": "rope", "norm": "rmsnorm", "value_embeddings": 1}
MOE = {"feed_forward": "moe", "num_experts": 4, "experts_per_token": 2}
LINKS = find_interconnect("H100", 4, 1, "infiniband")
SMALL = 2 * 3 * 4 * (2 * 16)  # bytes of the softmax's maxima and sums of two LM heads, which are not counted


class SentBytes(TorchDispatchMode):
    """Adds up what a rank sends in rings by torch's functional collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func).partition(".")[2].partition(".")[0].removesuffix("_into_tensor").removesuffix("_tensor")
        if str(func).startswith("_c10d_functional") and name in RINGS:
            ranks, whole = 2, max(args[0].nbytes, found.nbytes)
            self.by_kind[name] += int(RINGS[name] * (ranks - 1) / ranks * whole)
        return found


def plan_share(config: RunConfig, links: Interconnect = LINKS) -> tuple[TrainPlan, ShardedUnits, StepCommunication]:
    precision = config.machine.precision
    assert precision in ("fp32", "bf16")
    rate = MachineRate(links.gpus, precision, has_kernels=False, peak_flops_per_second=None)
    plan = derive_plan(config, CorpusSize(VOCAB, 10**6, 2, 0), rate)
    own = split_units(build_units(config, plan), config.machine)
    return plan, own, plan_split_communication(config, plan, own, links)


def make(**flags: Any) -> RunConfig:
    return make_config(None, {**SHAPE, "total_batch_size": 256, "precision": "bf16", **flags})


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel": 2, "precision": "fp32"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, **LLAMA, "mtp_heads": 1},
        {"tensor_parallel": 2, "gradient_checkpointing": "full"},
        {"context_parallel": 2, **LLAMA},
        {"context_parallel": 2, "gradient_checkpointing": "full"},
    ],
    ids=["fp32", "bf16", "tensor-llama", "tensor-recomputed", "context-llama", "context-recomputed"],
)
def test_a_micro_batch_sends_what_the_plan_says(flags: dict[str, Any]) -> None:
    config = make(**flags)
    kind = ContextParallelGPT if config.machine.context_parallel > 1 else GPT
    with open_fake_rank(0, LINKS) as fake:
        world = arrange_ranks(fake, "ddp", config.machine)
        model = build_gpt(config.model, VOCAB, 0, VOCAB, kind)
        split_model(model, world)
        if world.axis_size(CP) > 1:
            share_rows(model, RankRows(world.find_group(CP)))
        model.loss_config = LossConfig()
        model.set_activation_checkpointing(config.machine.gradient_checkpointing)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with SentBytes() as sent:
            with torch.autocast("cpu", torch.bfloat16, enabled=config.machine.precision == "bf16"):
                losses = model(tokens, tokens)
            losses.objective.backward()
    _, _, planned = plan_share(config)
    for kind_name in RINGS:
        each = planned.count_sent(kind_name, 2) - planned.count_sent(kind_name, 1)
        assert sent.by_kind[kind_name] == pytest.approx(each, abs=SMALL), kind_name
    assert sum(sent.by_kind.values()) > 5 * SMALL


def test_gradients_are_summed_over_copies_and_experts_apart() -> None:
    """All micro-batches apart, what remains is the sum of a step."""

    def count_once(**flags: Any) -> float:
        _, _, planned = plan_share(make(**flags))
        return 2 * planned.count_sent("all_reduce", 1) - planned.count_sent("all_reduce", 2)

    _, own, _ = plan_share(make(tensor_parallel=2))
    assert count_once(tensor_parallel=2) == pytest.approx(4 * own.total)  # two copies: 2 x 1/2 of the bytes
    assert count_once(tensor_parallel=4) == 0
    _, own, planned = plan_share(make(expert_parallel=2, **MOE))
    experts = sum(size for size in (2 * 2 * 32 * 2 * 64, 2 * 2 * 64 * 32))  # two of four, in two layers
    assert own.total < 2 * experts
    sums = 2 * 3 / 4 * 4 * (own.total - experts) + 4 * experts  # by all four ranks, and by the two that share experts
    assert planned.count_sent("all_reduce", 1) == pytest.approx(sums)
    exchanged = 2 * 2 * 2 * (1 / 2) * 2 * (2 * 16 * 2) * 32  # there and back, in both passes of two layers, in bf16
    assert planned.count_sent("all_to_all", 3) == pytest.approx(3 * exchanged)


def test_a_share_of_the_activations_is_kept() -> None:
    def estimate(**flags: Any) -> tuple[int, int, int]:
        config = make(**flags)
        plan, own, _ = plan_share(config)
        memory = estimate_split_memory(config, plan, own)
        return memory.activations, memory.logits, memory.buffers

    whole, shared, more = (estimate(tensor_parallel=size) for size in (1, 2, 4))
    assert whole[1] == 2 * shared[1] == 4 * more[1]
    assert whole[0] / 2 < shared[0] < whole[0]  # the residual stream is whole everywhere
    assert more[0] < shared[0]
    assert more[2] == 0 < shared[2]  # without copies nothing is summed
    rows = estimate(context_parallel=2)
    assert whole[1] == 2 * rows[1]
    gathered = 2 * (2 * 8) * 2 * 2 * 32  # in two layers, the other half of two windows, keys and values in bf16
    assert rows[0] == whole[0] / 2 + gathered


def test_rings_that_leave_a_machine_together_share_its_ports() -> None:
    links = Interconnect(gpus=16, nodes=2, link_rate=400.0, network_rate=100.0, network="own")
    assert links.find_ring(8).rate == 400.0
    assert links.find_ring(16).rate == 100.0
    assert links.find_ring(4, stride=2).rate == 400.0
    assert links.find_ring(8, stride=2).rate == 50.0
    assert links.find_ring(2, stride=8) == links.find_ring_across()
    assert links.find_ring_across().rate == 12.5
