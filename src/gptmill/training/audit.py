"""Audits: a rank recomputes a micro-batch of its neighbour, and both must have the same bits.

A processor that computes wrongly without an error (silent data corruption) spoils a run for days before anyone sees
it. With exact ranks the gradients of a micro-batch follow from weights, data and seed alone, so that any difference is
such an error. An audit costs one micro-batch per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.config.value_syntax import find_stage
from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.data_loader import DataLoader
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.seeds import make_step_seed, seed_everything
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.reduction import ExactReduction
from gptmill.training.state import TrainState

Bits = tuple[int, ...]


class CorruptionError(UserError):
    """A rank has computed other bits than another one from the same numbers."""

    exit_code = exit_codes.CORRUPTED


def check_audit(config: RunConfig, device: torch.device) -> None:
    """Raises UserError for audits of a run whose bits may differ for other reasons."""
    if config.guard.audit_freq is None:
        return
    machine = config.machine
    if not machine.exact_ranks:
        raise UserError("audit_freq compares bits, which needs --exact_ranks; add it, or leave audit_freq out")
    if device.type != "cpu" and not machine.deterministic:
        raise UserError(
            "audit_freq compares bits, which on a GPU needs --deterministic; add it, or leave audit_freq out"
        )


def is_audit_due(config: RunConfig, step: int) -> bool:
    return config.guard.audit_freq is not None and step % config.guard.audit_freq == 0


class Audit:
    """The audit of one step. Create it before the step's micro-batches, and compare after them, before the update."""

    def __init__(
        self, state: TrainState, loader: DataLoader, config: RunConfig, plan: TrainPlan, world: World, first: int
    ) -> None:
        """`first` is the first window of the step."""
        assert isinstance(state.reduction, ExactReduction), "only exact ranks are audited"
        self._state, self._loader, self._config, self._plan, self._world = state, loader, config, plan, world
        self._reduction, self._first = state.reduction, first
        self._found = self._recompute((world.rank + 1) % world.size)
        self._reduction.is_audited = True

    def compare(self) -> None:
        """Raises CorruptionError, on all ranks alike, if a rank's gradients do not have the bits that another found."""
        world, self._reduction.is_audited = self._world, False
        assert self._reduction.first_bits is not None, "compare after the step's micro-batches"
        own, found = gather_bits(self._reduction.first_bits, world), gather_bits(self._found, world)
        wrong = [rank for rank in range(world.size) if own[rank] != found[(rank - 1) % world.size]]
        if not wrong:
            return
        audited, auditor = wrong[0], (wrong[0] - 1) % world.size
        again = gather_bits(self._recompute(audited), world)
        votes = [(audited, own[audited]), (auditor, found[auditor]), *enumerate(again)]
        raise CorruptionError(describe_corruption(self._state.step + 1, find_deviators(votes), world.size))

    def _recompute(self, rank: int) -> Tensor:
        """Computes a rank's first micro-batch on this rank; returns the checksums of its gradients."""
        state, plan, step = self._state, self._plan, self._state.step + 1
        number, sampler = rank * plan.count_micro_batches(step), self._loader.sampler
        rows = self._loader.read_batch(self._first + number * sampler.samples_per_batch)
        batch = make_batch(rows, IGNORE_INDEX, plan.separator, find_stage(plan.context_warmup, step))
        seed_everything(make_step_seed(self._config.training.seed, state.step, number), self._world.device)
        self._reduction.clear_gradients()
        state.micro_batch_runner.begin_step()
        state.micro_batch_runner.run(batch, 1 / sampler.count_targets(self._first, plan.count_windows(step)))
        bits = self._reduction.sum_gradient_bits()
        self._reduction.clear_gradients()
        return bits


def gather_bits(bits: Tensor, world: World) -> list[Bits]:
    """The checksums of all ranks. Synchronises with the device."""
    if world.size == 1:
        return [tuple(bits.tolist())]
    received = [torch.empty_like(bits) for _ in range(world.size)]
    dist.all_gather(received, bits)
    return [tuple(each.tolist()) for each in received]


def find_deviators(votes: Sequence[tuple[int, Bits]]) -> list[int]:
    """The ranks whose bits are not those of the majority; all that voted if there is none."""
    ((most, count), *_) = Counter(bits for _, bits in votes).most_common()
    if 2 * count <= len(votes):
        return sorted({rank for rank, _ in votes})
    return sorted({rank for rank, bits in votes if bits != most})


def describe_corruption(step: int, ranks: Sequence[int], size: int) -> str:
    names = " or ".join(f"rank {rank}" for rank in ranks)
    advice = "leave its machine out" if size > 1 else "use another machine"
    return (
        f"step {step:,}: {names} computed wrong gradients: the same weights, data and random numbers gave other bits "
        f"(silent data corruption); {advice}, and resume from a checkpoint before this step"
    )
