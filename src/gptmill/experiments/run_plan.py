"""What a run will take: tokens, FLOPs, memory, disk, time and cost, before anything is trained, or by a probe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gptmill.config.errors import UserError
from gptmill.config.parallel_relations import count_data_ranks, count_sharing_ranks, list_split_flags
from gptmill.config.plan_request import PlanRequest, check_plan_request, count_nodes
from gptmill.config.relations import join_words
from gptmill.config.run import RunConfig
from gptmill.config.validation import check_config
from gptmill.experiments.child_run import Say
from gptmill.experiments.fake_ranks import Placement, simulate
from gptmill.experiments.probe import ProbeResult, probe
from gptmill.models.parameters import ParameterCount, count_parameters
from gptmill.runs.checkpoints.disk_space import free_bytes
from gptmill.runtime.interconnects import Interconnect, find_interconnect
from gptmill.runtime.world import World
from gptmill.training.host_memory_check import (
    check_activations_fit,
    check_state_fits,
    count_host_needs,
    has_ample_memory,
)
from gptmill.training.memory_estimate import MemoryEstimate
from gptmill.training.plan import TrainPlan, derive_plan
from gptmill.training.plan_checks import PlannedRun, PlanWarning, find_plan_warnings
from gptmill.training.planned_corpus import PlannedCorpus, read_planned_corpus
from gptmill.training.planned_machine import PlannedMachine, find_planned_machine
from gptmill.training.run_counts import RunCounts, count_run
from gptmill.training.strategy_estimate import PlannedCluster, StrategyEstimate, choose_estimate, estimate_strategies
from gptmill.training.strategy_memory import build_units
from gptmill.training.time_estimate import TimeEstimate, estimate_time

PROCESS_BYTES = 400_000_000  # Python and torch in host memory
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class RunPlan:
    """Every figure of a planned run."""

    config: RunConfig
    plan: TrainPlan
    corpus: PlannedCorpus
    machine: PlannedMachine
    parameters: ParameterCount
    counts: RunCounts
    memory_bytes: int
    """Peak of one device; on a CPU that of the process."""
    free_disk_bytes: int | None
    """None where the run is planned for another machine."""
    time: TimeEstimate | None
    """None where neither a probe nor the device's peak rate tells."""
    probe: ProbeResult | None
    warnings: tuple[PlanWarning, ...]
    links: Interconnect | None = None
    """Of several GPUs; None for one."""
    strategies: tuple[StrategyEstimate, ...] = ()
    """What several GPUs take, by how they share the model."""
    placements: tuple[Placement, ...] = ()
    """The planned memory beside that of fake ranks, where it was simulated."""

    @property
    def strategy(self) -> StrategyEstimate | None:
        """The one whose memory, time and cost the plan has: as configured, or the cheapest that fits."""
        return choose_estimate(self.strategies, self.config.machine.parallel) if self.strategies else None

    @property
    def savers(self) -> int:
        """Ranks that save a checkpoint together, each its part."""
        return self.strategy.savers if self.strategy else 1

    @property
    def tokens(self) -> int:
        return self.plan.count_tokens()

    @property
    def epochs(self) -> float | None:
        """Passes over the training split; None if its size is unknown."""
        return self.tokens / self.corpus.tokens if self.corpus.tokens else None

    @property
    def cost(self) -> float | None:
        """Dollars; None without a time or a price."""
        return None if self.time is None else self.price(self.time)

    def price(self, time: TimeEstimate) -> float | None:
        """Dollars of that time on all GPUs; None without a price."""
        if self.machine.price_per_hour is None:
            return None
        return time.total / SECONDS_PER_HOUR * self.machine.price_per_hour * self.machine.rate.ranks

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        plan, memory = self.plan, self.plan.memory
        return {
            "tokens": self.tokens,
            "steps": plan.max_steps,
            "tokens_per_step": plan.tokens_per_step,
            "micro_batches": plan.micro_batches,
            "epochs": self.epochs,
            "corpus": {"name": self.corpus.name, "tokens": self.corpus.tokens, "source": self.corpus.source},
            "parameters": {**asdict(self.parameters), "total": plan.parameters, "active": plan.active_parameters},
            "tokens_per_parameter": self.tokens / plan.parameters,
            "flops": plan.count_flops(),
            "flops_per_token": plan.flops_per_token,
            "device": self.machine.name,
            "ranks": plan.ranks,
            "precision": plan.precision,
            "memory_bytes": self.memory_bytes,
            "estimated_memory_bytes": asdict(memory) if memory else None,
            "device_memory_bytes": self.machine.memory_bytes,
            "available_memory_bytes": self.machine.available_bytes,
            "counts": asdict(self.counts),
            "free_disk_bytes": self.free_disk_bytes,
            "seconds": self.time.total if self.time else None,
            "time": asdict(self.time) if self.time else None,
            "price_per_hour": self.machine.price_per_hour,
            "cost": self.cost,
            "probe": asdict(self.probe) if self.probe else None,
            "links": asdict(self.links) if self.links else None,
            "strategy": self.strategy.strategy if self.strategy else None,
            "strategies": [
                {**each.to_dict(), "cost": self.price(each.time.run) if each.time else None} for each in self.strategies
            ],
            "placements": [each.to_dict() for each in self.placements],
            "warnings": [asdict(warning) for warning in self.warnings],
        }


def make_run_plan(config: RunConfig, request: PlanRequest, say: Say = lambda _: None) -> RunPlan:
    """Plans a run; only `request.probe` trains, for some steps. Raises UserError for a run that cannot be planned."""
    check_plan_request(request)
    check_sharing_ranks(config, request.gpus)
    check_config(config, count_data_ranks(config.machine, request.gpus))
    machine = find_planned_machine(config, request.gpu, request.gpus, request.price_per_hour)
    corpus = read_planned_corpus(config, request.corpus_tokens)
    plan = derive_plan(config, corpus.size, machine.rate)
    parameters = count_parameters(config.model, plan.padded_vocab_size)
    counts = count_run(config, plan, parameters)
    measured = None
    if request.probe:
        measured = probe(config, steps=request.probe_steps, ranks=request.gpus, say=say)
    time = estimate_time(config, plan, counts, request.mfu)
    if measured is not None:
        time = time_by_probe(plan, counts, measured)
    memory = estimate_memory(config, plan, counts, machine) if measured is None else measured.peak_memory_bytes
    links, strategies = compare_strategies(config, request, machine, plan, time)
    if strategies:
        chosen = choose_estimate(strategies, config.machine.parallel)
        memory = chosen.memory.total if measured is None else memory
        time = chosen.time.run if chosen.time else None
    placements = simulate(config, plan, links, strategies, say) if request.simulate and links else ()
    free = free_bytes(Path(config.tracking.logdir)) if machine.is_here else None
    checked = PlannedRun(
        config,
        plan,
        corpus_name=corpus.name,
        corpus_tokens=corpus.tokens,
        median_document_tokens=corpus.median_document_tokens,
        device_name=machine.name,
        device_memory_bytes=machine.memory_bytes if machine.available_bytes is None else None,
        needed_memory_bytes=memory,
        has_kernels=machine.rate.has_kernels,
        free_disk_bytes=free,
        counts=counts,
        time=time,
    )
    warnings = (
        *warn_of_host_memory(config, plan, machine),
        *find_plan_warnings(checked),
        *warn_of_splits(config, machine),
    )
    return RunPlan(
        config, plan, corpus, machine, parameters, counts, memory, free, time, measured, warnings, links, strategies,
        placements,
    )  # fmt: skip


def compare_strategies(
    config: RunConfig, request: PlanRequest, machine: PlannedMachine, plan: TrainPlan, alone: TimeEstimate | None
) -> tuple[Interconnect | None, tuple[StrategyEstimate, ...]]:
    """The links of several GPUs, and what each strategy takes on them; nothing for one GPU or a CPU."""
    if request.simulate and not machine.is_gpu:
        raise UserError("--simulate places a model on several GPUs; name their kind, e.g. --gpu h100")
    if request.gpus == 1 or not machine.is_gpu:
        return None, ()
    links = find_interconnect(machine.name, request.gpus, count_nodes(request), request.interconnect)
    units = build_units(config, plan)
    return links, estimate_strategies(config, plan, units, PlannedCluster(links, machine.memory_bytes, alone))


def check_sharing_ranks(config: RunConfig, gpus: int) -> None:
    """Raises UserError unless the GPUs hold whole copies of the model."""
    needed = count_sharing_ranks(config.machine)
    if gpus % needed:
        flags = join_words(list_split_flags(config.machine))
        raise UserError(f"{flags} takes {needed} GPUs or a multiple of them, not {gpus}; add --gpus {needed}")


def warn_of_host_memory(config: RunConfig, plan: TrainPlan, machine: PlannedMachine) -> list[PlanWarning]:
    """What gptmill train would refuse on this CPU, by the memory that is available now."""
    ranks, room = machine.rate.ranks, machine.available_bytes
    if list_split_flags(config.machine) or (ranks > 1 and config.machine.parallel in ("fsdp", "hsdp")):
        return []  # nor does it check them
    world = World(0, ranks, torch.device("cpu"))
    try:
        check_state_fits(config, plan, world, room)
        check_activations_fit(config, plan, world, room, lambda: None)
    except UserError as error:
        return [PlanWarning("memory", f"gptmill train would refuse this run now: {error}")]
    return []


def warn_of_splits(config: RunConfig, machine: PlannedMachine) -> list[PlanWarning]:
    """Says what the plan leaves out."""
    if machine.is_gpu or not (flags := list_split_flags(config.machine)):
        return []
    what = "memory is that of a model that is not split, and communication is not counted"
    return [PlanWarning("parallel", f"on a CPU the plan does not know {join_words(flags)}: its {what}")]


def estimate_memory(config: RunConfig, plan: TrainPlan, counts: RunCounts, machine: PlannedMachine) -> int:
    """Bytes of one device; on a CPU the process, its snapshots and gaps are in the same memory."""
    needed = plan.memory.total if plan.memory else 0
    if machine.is_gpu:
        return needed
    gaps = _count_gaps(config, plan, plan.memory, machine) if plan.memory else 0
    return needed + gaps + counts.snapshot_bytes + PROCESS_BYTES


def _count_gaps(config: RunConfig, plan: TrainPlan, memory: MemoryEstimate, machine: PlannedMachine) -> int:
    """What a rank's allocator holds beyond activations and logits."""
    world = World(0, machine.rate.ranks, torch.device("cpu"))
    is_ample = has_ample_memory(config, plan, world, machine.available_bytes)
    needs = count_host_needs(config, plan, world, maps_large_blocks=not is_ample)
    return max(0, needs.activations // world.size - memory.activations - memory.logits)


def time_by_probe(plan: TrainPlan, counts: RunCounts, measured: ProbeResult) -> TimeEstimate:
    """The time of the whole run from what a probe measured of its parts."""
    full_steps = plan.count_flops() / (plan.tokens_per_step * plan.flops_per_token)
    scorings = counts.scorings * measured.scoring_seconds
    noise = "; equal steps took very different times: is the machine busy?" if measured.is_noisy else ""
    compiled = f"; compiling took {measured.compile_seconds:.0f} s more, once" if measured.compile_seconds else ""
    return TimeEstimate(
        training=full_steps * measured.step_seconds,
        evaluation=counts.evaluations * measured.evaluation_seconds + scorings,
        checkpoints=max(0, counts.saves - 1) * measured.stall_seconds,
        startup=measured.startup_seconds + measured.finish_seconds,
        tokens_per_second=measured.tokens_per_second,
        mfu=measured.mfu,
        basis=f"measured by a probe on {measured.device}{compiled}{noise}",
    )
