"""Monitoring check of a run on a CPU: whether its threads fit the cores, get them, and have enough to do.

Knows no clock and no machine: the steps bring what was measured.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from gptmill.config.run import RunConfig
from gptmill.runs.events import StepLogged
from gptmill.runtime.cpu_usage import Cores, find_cores
from gptmill.runtime.parallel.mesh import read_local_size
from gptmill.runtime.toolchain import find_obstacle
from gptmill.training.alarm import Alarm, Recent, Settling
from gptmill.training.learning_checks import Check
from gptmill.training.plan import TrainPlan

FINE_SHARE = 1.1
MAX_WAIT = 0.05  # of the time; whoever waits for data needs no cores
FULL = 0.1  # of the cores: where fewer idle, threads wait for a core
FOREIGN = 0.2  # of the cores, in the hands of other programs
BUSY = 0.8  # of the threads' time
LONG_PASS_SECONDS = 0.1  # a micro-batch that more threads can share
SMALL_LAYER_FLOPS = 2.5e8  # per thread and micro-batch: Python takes a good part of the time that they take
THREADS_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set counts


@dataclass(frozen=True)
class CpuRun:
    """What a run on a CPU is, and what it runs on."""

    cores: Cores
    threads: int
    """Of each rank, for torch's operators."""
    ranks: int
    """On this machine."""
    variable: str
    """The environment variable that sets the threads."""
    micro_batches: int
    layer_flops: float
    """Of one micro-batch in one layer, forward and backward; 0 if unknown."""
    remedies: str
    """What leaves less of the time to Python, at no cost; empty if the model is compiled."""


def find_cpu_run(config: RunConfig, plan: TrainPlan, ranks: int) -> CpuRun:
    """This process's threads, and the cores that they share with the other ranks of this machine."""
    rows, batches = config.training.mini_batch_size, plan.micro_batches
    variable = next((name for name in THREADS_VARIABLES if os.environ.get(name)), THREADS_VARIABLES[-1])
    changes = []
    if batches > 1 and not config.machine.compile:
        larger = rows * next(factor for factor in range(2, batches + 1) if batches % factor == 0)
        changes.append(f"raise --mini_batch_size to {larger} or more (it is {rows}; total_batch_size stays as it is)")
    if not config.machine.compile and find_obstacle("cpu") is None:
        changes.append("add --compile, which is off")
    return CpuRun(
        find_cores(),
        torch.get_num_threads(),
        read_local_size(ranks),
        variable,
        batches,
        rows * config.model.context_length * plan.flops_per_token / config.model.num_layers,
        " or ".join(changes),
    )


class CpuCheck(Check):
    """Whether a run on a CPU is slower than its machine."""

    about = "cpu"

    def __init__(self, share: float, run: CpuRun) -> None:
        self._share, self._run = share, run
        self._used, self._idle, self._waited = Recent(), Recent(), Recent()
        self._settling, self._alarm = Settling(), Alarm()

    def reset(self) -> None:
        for recent in (self._used, self._idle, self._waited):
            recent.clear()

    def see_pause(self, time: float) -> str:
        self._settling.note_pause(time)
        return ""

    def see_step(self, event: StepLogged) -> str:
        used = event.telemetry.get("host_cpu_cores")
        if self._settling.includes(event.time) or used is None:
            return ""  # the samples are of the evaluation
        self._used.add(used, event.seconds)
        self._idle.add(event.telemetry.get("host_idle_cores", math.nan), event.seconds)
        self._waited.add(event.data_wait, event.seconds)
        if not self._used.is_full:
            return ""
        cause = self._find_cause(event)
        is_fine = not cause and self._used.average() >= FINE_SHARE * self._share * self._wanted
        return cause if self._alarm.check(is_bad=bool(cause), is_fine=is_fine, time=event.time) else ""

    @property
    def _wanted(self) -> float:
        """The cores that the threads of this rank would keep busy."""
        return min(self._run.threads, self._run.cores.allowed)

    def _find_cause(self, event: StepLogged) -> str:
        if cause := self._find_crowd():
            return cause
        if self._waited.average() > MAX_WAIT:
            return ""
        return self._find_unused_cores(event) or self._find_other_programs() or self._find_overhead()

    def _find_crowd(self) -> str:
        run = self._run
        threads, cores = run.threads * run.ranks, run.cores.allowed
        if threads <= math.ceil(cores):
            return ""
        whose = f"the run has {threads} threads"
        if run.ranks > 1:
            whose = f"{run.ranks} ranks run {run.threads} threads each"
        fitting = max(1, int(cores / run.ranks))
        return (
            f"{whose}, but may use {cores:g} cores only, so that threads wait for each other: set "
            f"{run.variable}={fitting} at the next start"
        )

    def _find_unused_cores(self, event: StepLogged) -> str:
        run, used, idle = self._run, self._used.average(), self._idle.average()
        is_small = 2 * run.threads * run.ranks <= min(run.cores.physical, run.cores.allowed)
        pass_seconds = event.step_seconds / max(1, run.micro_batches)
        if not is_small or used < BUSY * run.threads or pass_seconds < LONG_PASS_SECONDS:
            return ""
        if not idle >= run.threads * run.ranks:
            return ""
        return (
            f"the run keeps its {run.threads} thread(s) busy while {idle:.1f} of {run.cores.allowed:g} cores idle: set "
            f"{run.variable}={min(run.cores.physical, int(run.cores.allowed)) // run.ranks} at the next start"
        )

    def _find_other_programs(self) -> str:
        run, used, idle = self._run, self._used.average(), self._idle.average()
        cores, others = run.cores.allowed, run.cores.allowed - idle - used
        if run.ranks > 1 or used >= self._share * self._wanted or not idle < FULL * cores or others < FOREIGN * cores:
            return ""
        return (
            f"other programs took {others:.1f} of {cores:g} cores for the last {self._used.seconds:.0f} s, and the "
            f"{run.threads} thread(s) of the run got {used:.1f}: end them, or run elsewhere; with no more threads than "
            f"free cores ({run.variable}={max(1, round(cores - others))}) they do not wait for each other"
        )

    def _find_overhead(self) -> str:
        run = self._run
        if not run.remedies or not 0 < run.layer_flops < SMALL_LAYER_FLOPS * run.threads:
            return ""
        return (
            f"the micro-batches are so small ({run.layer_flops / 1e9:.2g} GFLOP in each layer for {run.threads} "
            f"thread(s)) that Python takes a good part of the time: {run.remedies}"
        )
