"""A run on a CPU that is slower than its machine hears why, with its own values; others hear nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from steps import make_step, show
from tiny import make_config, make_shards, plan_for

from gptmill.runs.events import EvalDone, Event
from gptmill.runtime.cpu_usage import Cores
from gptmill.training.cpu_check import CpuCheck, CpuRun, find_cpu_run
from gptmill.training.monitor import build_monitor

USUAL = CpuRun(Cores(8, 4), 4, 1, "OMP_NUM_THREADS", 2, 1e10, "add --compile, which is off")


def make_steps(used: float, idle: float | None, *, data_wait: float = 0.0, seconds: float = 2.0) -> list[Event]:
    telemetry = {"host_cpu_cores": used} | ({} if idle is None else {"host_idle_cores": idle})
    return [make_step(step, seconds, data_wait=data_wait, telemetry=telemetry) for step in range(1, int(80 / seconds))]


def warn(run: CpuRun, events: list[Event]) -> list[str]:
    warnings = show(CpuCheck(0.7, run), events)
    assert all(warning.about == "cpu" for warning in warnings)
    return [warning.message.partition(": ")[2] for warning in warnings]


def test_more_threads_than_cores() -> None:
    (said,) = warn(replace(USUAL, cores=Cores(2, 32), threads=32), make_steps(2.0, 60.0))
    assert said == (
        "the run has 32 threads, but may use 2 cores only, so that threads wait for each other: set "
        "OMP_NUM_THREADS=2 at the next start"
    )
    (said,) = warn(replace(USUAL, ranks=4, variable="MKL_NUM_THREADS"), make_steps(2.0, 0.0))
    assert said.startswith("4 ranks run 4 threads each, but may use 8 cores only")
    assert "set MKL_NUM_THREADS=2" in said


def test_fewer_threads_than_half_of_the_cores() -> None:
    single = replace(USUAL, threads=1)
    (said,) = warn(single, make_steps(1.0, 6.9))
    assert said.startswith("the run keeps its 1 thread(s) busy while 6.9 of 8 cores idle: set OMP_NUM_THREADS=4 at")
    assert warn(single, make_steps(1.0, 0.5)) == []  # others have the cores
    assert warn(single, make_steps(0.5, 7.0)) == []  # it does not compute all the time
    assert warn(single, make_steps(1.0, 6.9, seconds=0.1)) == []  # too little to share
    assert warn(single, make_steps(1.0, None)) == []


def test_other_programs() -> None:
    (said,) = warn(USUAL, make_steps(1.5, 0.2))
    assert "other programs took 6.3 of 8 cores for the last 30 s, and the 4 thread(s) of the run got 1.5" in said
    assert "(OMP_NUM_THREADS=2)" in said
    assert warn(USUAL, make_steps(1.5, 3.0)) == []  # there are free cores
    assert warn(USUAL, make_steps(3.5, 0.2)) == []  # it gets its cores
    assert warn(USUAL, make_steps(1.5, 0.2, data_wait=0.3)) == []  # it waits for data


def test_small_micro_batches() -> None:
    small = replace(USUAL, layer_flops=2e8)
    (said,) = warn(small, make_steps(4.0, 3.9))
    assert said == (
        "the micro-batches are so small (0.2 GFLOP in each layer for 4 thread(s)) that Python takes a good part of "
        "the time: add --compile, which is off"
    )
    assert warn(replace(small, remedies=""), make_steps(4.0, 3.9)) == []


def test_a_run_that_has_its_cores_hears_nothing_nor_does_one_that_evaluates() -> None:
    assert warn(USUAL, make_steps(3.9, 4.0)) == []
    events: list[Event] = []
    for step in make_steps(1.5, 0.2):
        events += [step, EvalDone(step.step, 3.0, 64, 1.0, time=step.time)]
    assert warn(USUAL, events) == []


def test_a_run_knows_what_it_can_change(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards(text_file)
    monkeypatch.setattr("gptmill.training.cpu_check.find_obstacle", lambda _: None)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    config = make_config(mini_batch_size=2, total_batch_size=192)
    plan = plan_for(config, shards)
    run = find_cpu_run(config, plan, 1)
    assert run.variable == "OMP_NUM_THREADS"
    assert run.remedies == (
        "raise --mini_batch_size to 4 or more (it is 2; total_batch_size stays as it is) or add --compile, which is off"
    )
    compiled = replace(config, machine=replace(config.machine, compile=True))
    assert find_cpu_run(compiled, plan, 1).remedies == ""
    monitor = build_monitor(config, plan, None, cpu=run)
    assert [warning.about for step in make_steps(1.0, 0.0) for warning in monitor.check(step)] == ["cpu"]
