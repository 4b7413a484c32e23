"""Reduction: how the gradients and losses of micro-batches, on all ranks, become those of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptmill.runtime.parallel.split_model import average_experts
from gptmill.runtime.world import World
from gptmill.training.exact_sum import Node, TreeSum, list_nodes, list_numbers, sum_bits, sum_nodes
from gptmill.training.optimizers.ownership import Ownership, flatten, split_flat


class PlainReduction:
    """Adds in the order of computation. DDP and FSDP, where there are several ranks, average gradients over them."""

    is_exact = False
    is_averaged = True

    def __init__(self) -> None:
        self._totals: Tensor | None = None

    def begin_step(self) -> None:
        """Call before the first micro-batch of a step."""
        self._totals = None

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:  # noqa: ARG002
        """Wraps forward and backward of a micro-batch with this global number."""
        yield

    def add_totals(self, number: int, totals: Tensor) -> None:  # noqa: ARG002
        """Adds a micro-batch's losses and counts: see `step_stats.make_totals`."""
        self._totals = totals if self._totals is None else self._totals + totals

    def reduce_totals(self, stop: bool, tokens: int, world: World) -> Tensor:
        """One vector: whether any rank is to stop, then the totals of all ranks, with mean losses in front."""
        assert self._totals is not None, "a step has at least one micro-batch"
        # The stop flag shares the all-reduce of the losses, so that agreeing on it costs nothing.
        stop_flag = torch.full((1,), float(stop), device=world.device)
        return world.sum_over_data(torch.cat([stop_flag, self._totals[:2] / tokens, self._totals[2:]]))

    def reduce_gradients(self) -> None:
        """Call after the last micro-batch: the parameters then have the gradients of the step."""


class ExpertReduction(PlainReduction):
    """The same with experts that ranks share: DDP leaves their gradients alone."""

    def __init__(self, experts: Sequence[nn.Parameter], world: World) -> None:
        super().__init__()
        self._experts, self._world = experts, world

    def reduce_gradients(self) -> None:
        average_experts(self._experts, self._world)


class OwnerReduction(PlainReduction):
    """Sums the gradients of all ranks at the owners of the parameters (ZeRO-1)."""

    is_averaged = False

    def __init__(self, model: nn.Module, world: World, *, is_sharded: bool) -> None:
        super().__init__()
        self._ownership, self._is_sharded = Ownership(model, world), is_sharded

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        gradients = _fill_gradients(self._ownership.parameters)
        _deliver(self._ownership, self._ownership.sum_to_owners(gradients), is_sharded=self._is_sharded)


class ExactReduction:
    """Adds in one fixed tree over the global numbers of the micro-batches, on any number of ranks.

    With several ranks, the gradients of each parameter are summed by its owner. They stay there for a sharded
    optimizer; any other gets all of them on every rank. With `keeps_gradients`, the parameters keep their gradient
    tensors, as captured CUDA graphs need.
    """

    is_exact = True
    is_averaged = False

    def __init__(self, model: nn.Module, world: World, *, is_sharded: bool, keeps_gradients: bool = False) -> None:
        self._ownership = Ownership(model, world)
        self._parameters, self._world = self._ownership.parameters, world
        self._is_sharded, self._keeps_gradients = is_sharded, keeps_gradients
        self._gradients, self._totals = TreeSum(), TreeSum()
        self._current: Node | None = None  # the node whose gradients the parameters hold
        self._num_micro_batches = 0
        self.is_audited = False
        """Whether to keep the checksums of the first micro-batch's gradients, as `first_bits`."""
        self.first_bits: Tensor | None = None

    def begin_step(self) -> None:
        self._gradients, self._totals = TreeSum(), TreeSum()
        self._current, self._num_micro_batches = None, 0

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        leaf = Node(0, number)
        if leaf.is_right and self._current == leaf.sibling:
            self._current = leaf.parent  # autograd adds to the left half as the tree does
        else:
            self._put_aside()
            self._current = leaf
        yield
        _fill_gradients(self._parameters)
        if self.is_audited and self._num_micro_batches == 0:
            self.first_bits = self.sum_gradient_bits()
        self._num_micro_batches += 1

    def add_totals(self, number: int, totals: Tensor) -> None:
        self._totals.push(Node(0, number), [totals])

    def reduce_totals(self, stop: bool, tokens: int, world: World) -> Tensor:
        stop_flag = torch.full((1,), float(stop), device=world.device)
        if world.size == 1:
            (totals,) = self._totals.finish()
            return torch.cat([stop_flag, totals[:2] / tokens, totals[2:]])
        nodes = self._list_all_nodes()
        rows = [torch.cat([stop_flag, row]) for _, (row,) in self._totals.take_nodes()]
        rows += [torch.zeros_like(rows[0])] * (max(map(len, nodes)) - len(rows))
        sent = torch.stack(rows)
        received = [torch.empty_like(sent) for _ in range(world.size)]
        dist.all_gather(received, sent)
        stops = torch.stack([rows[0, :1] for rows in received]).sum(dim=0)
        pairs = [(node, [rows[i, 1:]]) for own, rows in zip(nodes, received, strict=True) for i, node in enumerate(own)]
        (totals,) = sum_nodes(pairs)
        return torch.cat([stops, totals[:2] / tokens, totals[2:]])

    def sum_gradient_bits(self) -> Tensor:
        """A checksum of each parameter's gradient."""
        return sum_bits(_fill_gradients(self._parameters))

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            if self._keeps_gradients and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        if self._world.size > 1:
            self._put_aside()
            self._exchange()
        elif self._gradients:  # otherwise the parameters hold the sum already
            self._put_aside()
            self._assign(self._gradients.finish())

    def _put_aside(self) -> None:
        """Moves the current gradients to the tree."""
        if self._current is None:
            return
        gradients = _list_gradients(self._parameters)
        if self._keeps_gradients:
            gradients = [gradient.clone() for gradient in gradients]
            torch._foreach_zero_(_list_gradients(self._parameters))
        else:
            for parameter in self._parameters:
                parameter.grad = None
        self._gradients.push(self._current, gradients)
        self._current = None

    def _assign(self, gradients: Sequence[Tensor]) -> None:
        if self._keeps_gradients:
            torch._foreach_copy_(_list_gradients(self._parameters), list(gradients))
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _exchange(self) -> None:
        """Sends the gradients of every whole node to the owners of the parameters, which complete the tree."""
        nodes, own, rank = self._list_all_nodes(), self._ownership.own, self._world.rank
        sums = [self._ownership.split(gradients) for _, gradients in self._gradients.take_nodes()]
        sizes = [sum(map(torch.numel, self._ownership.select(owner))) for owner in range(self._world.size)]
        sent = flatten(tensor for owner in range(self._world.size) for node in sums for tensor in node[owner])
        received = sent.new_empty(sizes[rank] * sum(map(len, nodes)))
        sums.clear()
        dist.all_to_all_single(
            received,
            sent,
            [sizes[rank] * len(part) for part in nodes],
            [size * len(nodes[rank]) for size in sizes],
        )
        parts = received.split(sizes[rank]) if own else ()
        totals = sum_nodes((node, [part]) for node, part in zip(chain(*nodes), parts, strict=True)) if own else []
        _deliver(self._ownership, split_flat(totals[0], own) if own else [], is_sharded=self._is_sharded)

    def _list_all_nodes(self) -> list[list[Node]]:
        """The whole nodes that each rank has computed."""
        count, size = self._num_micro_batches, self._world.size
        return [list_nodes(list_numbers(count, rank, size, is_exact=True)) for rank in range(size)]


Reduction = PlainReduction | ExactReduction


def build_reduction(
    model: nn.Module,
    world: World,
    *,
    is_exact: bool,
    is_sharded: bool,
    keeps_gradients: bool,
    experts: Sequence[str] = (),
) -> Reduction:
    """The reduction for a model and its optimizer, sharded or not; ranks share the parameters `experts`."""
    if experts:
        return ExpertReduction([model.get_parameter(name) for name in experts], world)
    if is_exact:
        return ExactReduction(model, world, is_sharded=is_sharded, keeps_gradients=keeps_gradients)
    if world.strategy == "zero1" and world.size > 1:
        return OwnerReduction(model, world, is_sharded=is_sharded)
    return PlainReduction()


def _deliver(ownership: Ownership, own_gradients: Sequence[Tensor], *, is_sharded: bool) -> None:
    """Gives this rank's parameters their gradients; and the others theirs, unless the optimizer is sharded."""
    for parameter in ownership.parameters:
        parameter.grad = None if is_sharded else torch.empty_like(parameter)
    for parameter, gradient in zip(ownership.own, own_gradients, strict=True):
        parameter.grad = gradient
    if not is_sharded:
        ownership.share(_list_gradients(ownership.parameters))


def _fill_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients, zeros where a parameter has had no part in the loss."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return _list_gradients(parameters)


def _list_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters), "every trainable parameter has a gradient"
    return gradients
