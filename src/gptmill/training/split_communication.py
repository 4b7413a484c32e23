"""What ranks send each other that share layers, windows or experts.

All of it lies between computations that wait for it: nothing hides it but the sums of gradients over copies.
"""

from __future__ import annotations

from gptmill.config.model import Moe
from gptmill.config.run import RunConfig
from gptmill.runtime.interconnects import Interconnect
from gptmill.training.communication import Collective, StepCommunication, plan_bucketed_sum
from gptmill.training.memory_estimate import FP32, HALF, HALF_PRECISIONS
from gptmill.training.plan import TrainPlan
from gptmill.training.split_memory import count_experts, splits_vocabulary
from gptmill.training.strategy_memory import ShardedUnits

Both = tuple[list[Collective], list[Collective]]
"""Collectives of a forward and of a backward pass."""


def plan_split_communication(
    config: RunConfig, plan: TrainPlan, own: ShardedUnits, links: Interconnect
) -> StepCommunication:
    """The collectives of a step, where a rank holds the parameters `own`."""
    machine = config.machine
    forward: list[Collective] = []
    backward: list[Collective] = []
    for ahead, back in (
        _plan_tensor(config, plan, links),
        _plan_context(config, plan, links),
        _plan_expert(config, plan, links),
    ):
        forward += ahead
        backward += back
    inner = StepCommunication(tuple(forward), tuple(backward), ends=(*forward, *backward))
    experts, stride = count_experts(own), machine.tensor_parallel
    summed = plan_bucketed_sum(own.total - experts, links.find_ring(links.gpus // stride, stride), inner)
    if machine.expert_parallel == 1:
        return summed
    copies = links.find_ring(links.gpus // machine.expert_parallel, machine.expert_parallel)
    return summed.add_after(Collective("all_reduce", FP32 * experts, *copies))


def _plan_tensor(config: RunConfig, plan: TrainPlan, links: Interconnect) -> Both:
    """Both halves of a block are summed, and in the backward pass the gradients of their inputs, in fp32 as norms are.

    So are the embedding, and the gradients of the LM heads' inputs. Recomputation stops before a block's last sum.
    """
    size, model = config.machine.tensor_parallel, config.model
    if size == 1:
        return [], []
    ring, blocks = links.find_ring(size), model.num_layers + model.mtp_heads
    stream = _count_tokens(config) * model.embd_size

    def add(count: int, number: int) -> list[Collective]:
        return [Collective("all_reduce", count * number * stream, *ring, calls=count)] if count else []

    number, is_split = _find_number(plan), splits_vocabulary(plan.padded_vocab_size, config.machine)
    again = 0 if config.machine.gradient_checkpointing == "none" else blocks
    heads = 1 + model.mtp_heads if is_split else 0
    return add(2 * blocks, number) + add(int(is_split), FP32), add(2 * blocks + heads, FP32) + add(again, number)


def _plan_context(config: RunConfig, plan: TrainPlan, links: Interconnect) -> Both:
    """Keys and values are gathered in every block, and their gradients summed where they came from."""
    machine, model = config.machine, config.model
    size = machine.context_parallel
    if size == 1:
        return [], []
    ring, blocks = links.find_ring(size, machine.tensor_parallel), model.num_layers + model.mtp_heads
    keys = _count_tokens(config) * size * model.kv_heads // machine.tensor_parallel * model.head_width
    bytes_sent = blocks * 2 * _find_number(plan) * keys
    gather = Collective("all_gather", bytes_sent, *ring, calls=blocks)
    again = [] if machine.gradient_checkpointing == "none" else [gather]
    return [gather], [Collective("reduce_scatter", bytes_sent, *ring, calls=blocks), *again]


def _plan_expert(config: RunConfig, plan: TrainPlan, links: Interconnect) -> Both:
    """Tokens go to their experts and back in every block, as do their gradients; equally many to each rank."""
    machine, model = config.machine, config.model
    if machine.expert_parallel == 1:
        return [], []
    assert isinstance(model.feed_forward, Moe)
    ring, calls = links.find_ring(machine.expert_parallel), 2 * (model.num_layers + model.mtp_heads)
    tokens = _count_tokens(config) * model.feed_forward.experts_per_token
    exchange = Collective("all_to_all", calls * _find_number(plan) * tokens * model.embd_size, *ring, calls=calls)
    again = [] if machine.gradient_checkpointing == "none" else [exchange]
    return [exchange], [exchange, *again]


def _count_tokens(config: RunConfig) -> int:
    """Tokens of a micro-batch that one rank computes."""
    return config.training.mini_batch_size * config.model.context_length // config.machine.context_parallel


def _find_number(plan: TrainPlan) -> int:
    return HALF if plan.precision in HALF_PRECISIONS else FP32
