"""What ranks send each other in a step, and how much of it the computation hides.

Ring algorithms over n ranks, as NCCL uses them for large messages: to gather or to reduce-scatter S bytes, each rank
sends (n - 1)/n x S in n - 1 hops; an all-reduce is one of each. Nothing here has been measured: no machine with several
GPUs was at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gptmill.config.run import ParallelName
from gptmill.runtime.interconnects import Interconnect, Ring
from gptmill.training.memory_estimate import FP32
from gptmill.training.strategy_memory import ShardedUnits

REACHED_SHARE = 0.8  # of a nominal rate: between H100s, 376 of 450 GB/s are known (NVIDIA/nccl issue 1264)
BUCKET_BYTES = 25 << 20  # DDP sums gradients in buckets of this size; the last one has nothing left to hide behind
FORWARD_SHARE = 1 / 3  # of the time of a micro-batch

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
RINGS: dict[CollectiveKind, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Collective:
    """One collective over a group of ranks."""

    kind: CollectiveKind
    size_bytes: float
    """Of the whole: what all ranks have in the end, or had in the beginning."""
    ranks: int
    rate: float
    """Nominal bytes per second of each rank."""
    latency: float
    """Seconds once around the ring, however little is sent."""
    calls: int = 1
    """Into how many it is divided, one after the other."""

    @property
    def sent_bytes(self) -> float:
        """What each rank sends."""
        return RINGS[self.kind] * (self.ranks - 1) / self.ranks * self.size_bytes

    @property
    def seconds(self) -> float:
        waits = RINGS[self.kind] * self.calls * self.latency
        return self.sent_bytes / (REACHED_SHARE * self.rate) + waits


@dataclass(frozen=True)
class StepCommunication:
    """The collectives of a step, by what they can hide behind."""

    forward: tuple[Collective, ...] = ()
    """In every micro-batch, during its forward pass."""
    backward: tuple[Collective, ...] = ()
    """In every micro-batch, during its backward pass."""
    last_backward: tuple[Collective, ...] = ()
    """During the backward pass of the last micro-batch."""
    ends: tuple[Collective, ...] = ()
    """The parts of the above, in every micro-batch, that come before or after all computation."""
    last_end: tuple[Collective, ...] = ()
    """The same of `last_backward`."""
    after: tuple[Collective, ...] = ()
    """After all computation."""

    def add_after(self, collective: Collective) -> StepCommunication:
        return replace(self, after=(*self.after, collective))

    def count_sent(self, kind: CollectiveKind, micro_batches: int) -> float:
        """Bytes that each rank sends in a step."""
        each, once = (*self.forward, *self.backward), (*self.last_backward, *self.after)
        return micro_batches * _sum_sent(each, kind) + _sum_sent(once, kind)

    def count_seconds(self, micro_batches: int) -> float:
        """Seconds of all collectives of a step, hidden or not."""
        each = _sum_seconds((*self.forward, *self.backward))
        return micro_batches * each + _sum_seconds((*self.last_backward, *self.after))

    def count_exposed_seconds(self, compute_seconds: float, micro_batches: int) -> float:
        """Seconds of a step in which nothing is computed.

        A collective hides behind all of the pass that it belongs to, at no cost to the computation, except for the
        ends.
        """
        forward = compute_seconds / micro_batches * FORWARD_SHARE
        backward = compute_seconds / micro_batches - forward
        ends, last_end = _sum_seconds(self.ends), _sum_seconds(self.last_end)
        sent_forward, sent_backward = _sum_seconds(self.forward), _sum_seconds(self.backward)
        beyond = max(0.0, sent_forward - forward) + max(0.0, sent_backward - backward)
        last_backward = sent_backward + _sum_seconds(self.last_backward)
        last = max(0.0, sent_forward - forward) + max(0.0, last_backward - backward)
        exposed = (micro_batches - 1) * max(ends, beyond) + max(ends + last_end, last)
        return exposed + _sum_seconds(self.after)


NOTHING = StepCommunication()


def plan_communication(
    strategy: ParallelName,
    units: ShardedUnits,
    number_bytes: int,
    links: Interconnect,
    *,
    holds_gradients: bool = False,
) -> StepCommunication:
    """The collectives of a strategy; weights are gathered in the dtype that computes, gradients summed in fp32.

    `holds_gradients`: see `estimate_strategy_memory`.
    """
    if strategy == "ddp":
        return plan_bucketed_sum(units.total, links.find_ring(links.gpus))
    if strategy == "zero1":
        return _plan_zero1(units, links)
    gathers = _plan_gathers(strategy, units, number_bytes, links)
    return _add_sums(gathers, strategy, units, links, holds_gradients=holds_gradients)


def plan_bucketed_sum(numbers: int, ring: Ring, inner: StepCommunication = NOTHING) -> StepCommunication:
    """DDP: one all-reduce of all gradients, in the last micro-batch, besides what the ranks send in all of them."""
    size = FP32 * numbers
    buckets = max(1, round(size / BUCKET_BYTES))
    return replace(
        inner,
        last_backward=(Collective("all_reduce", size, *ring, buckets),),
        last_end=(Collective("all_reduce", min(size, BUCKET_BYTES), *ring),),
    )


def _plan_zero1(units: ShardedUnits, links: Interconnect) -> StepCommunication:
    """Gradients are summed at their owners once all are there; each updates its weights and sends them to all."""
    size, ring = FP32 * units.total, links.find_ring(links.gpus)
    kinds: tuple[CollectiveKind, ...] = ("reduce_scatter", "all_gather")
    return StepCommunication(after=tuple(Collective(kind, size, *ring, links.gpus) for kind in kinds))


def _plan_gathers(
    strategy: ParallelName, units: ShardedUnits, number_bytes: int, links: Interconnect
) -> StepCommunication:
    """FSDP: blocks are gathered for each pass, the root once; hybrid: within a machine."""
    ring = _find_shard_ring(strategy, links)
    blocks, count = units.total - units.root, units.num_blocks
    root = Collective("all_gather", number_bytes * units.root, *ring)
    each = Collective("all_gather", number_bytes * blocks, *ring, count)
    first = Collective("all_gather", number_bytes * units.block, *ring)
    return StepCommunication(forward=(root, each), backward=(each,), ends=(root, first))


def _add_sums(
    gathers: StepCommunication,
    strategy: ParallelName,
    units: ShardedUnits,
    links: Interconnect,
    *,
    holds_gradients: bool,
) -> StepCommunication:
    """The sums of gradients, block by block, in every micro-batch or in the last; hybrid: of shards across machines."""

    def add(numbers: int, calls: int) -> tuple[Collective, ...]:
        ring = _find_shard_ring(strategy, links)
        inside = Collective("reduce_scatter", FP32 * numbers, *ring, calls)
        if strategy == "fsdp":
            return (inside,)
        return (inside, Collective("all_reduce", FP32 * numbers / ring.ranks, *links.find_ring_across(), calls))

    sums, root = add(units.total, units.num_blocks + 1), add(units.root, 1)
    if holds_gradients:
        return replace(gathers, last_backward=sums, last_end=root)
    return replace(gathers, backward=(*gathers.backward, *sums), ends=(*gathers.ends, *root))


def _find_shard_ring(strategy: ParallelName, links: Interconnect) -> Ring:
    return links.find_ring(links.gpus if strategy == "fsdp" else links.gpus_per_node)


def _sum_sent(collectives: Iterable[Collective], kind: CollectiveKind) -> float:
    return sum(each.sent_bytes for each in collectives if each.kind == kind)


def _sum_seconds(collectives: Iterable[Collective]) -> float:
    return sum(each.seconds for each in collectives)
