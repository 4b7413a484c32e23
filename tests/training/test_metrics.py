"""Metrics log every step once, in order, with its tokens per second."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CPU, make_config, make_shards, plan_for

from gptmill.config.run import GuardConfig
from gptmill.config.value_syntax import Stage
from gptmill.runs.events import Event, StepLogged, Warned
from gptmill.runtime.telemetry import Telemetry
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training.metrics import Metrics
from gptmill.training.plan import TrainPlan
from gptmill.training.spike_detector import SpikeDetector
from gptmill.training.step import StepStats


class LateTimestamp(DeviceTimestamp):
    """Stands for a moment on a GPU, which the CPU has not: remembers how often it was waited for."""

    is_on_device = True
    waits = 0

    def wait(self) -> None:
        self.waits += 1


def make_stats(
    step: int, *, stop: bool = False, arrived: DeviceTimestamp | None = None, seconds: float = 0.0
) -> StepStats:
    """The stats of a step that took `seconds`, and has just ended."""
    values = torch.tensor([step / 4, 1.0, float(stop), 10.0 / step, 10.0 / step])
    started = DeviceTimestamp(CPU.device)
    time.sleep(seconds)
    return StepStats(step, step / 8, 128, step * 1e-4, values, started, arrived or DeviceTimestamp(CPU.device))


@pytest.fixture
def plan(text_file: Path) -> TrainPlan:
    return plan_for(make_config(max_steps=20, steps_per_epoch=8), make_shards(text_file))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("flush_every", [1, 3, 100])
def test_every_step_is_logged_once_and_in_order(plan: TrainPlan, on_gpu: bool, flush_every: int) -> None:
    logged: list[StepLogged] = []
    metrics = Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append)
    for step in range(1, 21):
        metrics.push(make_stats(step, arrived=LateTimestamp(CPU.device) if on_gpu else None))
        if step % flush_every == 0:
            metrics.flush()
    metrics.flush()
    metrics.flush()
    assert [event.step for event in logged] == list(range(1, 21))
    for event in logged:
        assert event.loss == pytest.approx(10 / event.step)
        assert event.grad_norm == event.step / 4
        assert event.lr == event.step * 1e-4
        assert event.epoch == event.step / 8


def test_telemetry_and_its_warnings_come_with_the_logged_step(plan: TrainPlan) -> None:
    logged: list[Event] = []
    telemetry = Telemetry()
    metrics = Metrics(plan, 2, SpikeDetector(GuardConfig()), logged.append, telemetry=telemetry)
    telemetry.add({"gpu_power_watts": 600.0})
    metrics.push(make_stats(1))
    telemetry.add({"gpu_power_watts": 500.0})
    telemetry.warn("GPU telemetry is off")
    metrics.push(make_stats(2))
    step, warning = logged
    assert isinstance(step, StepLogged)
    assert isinstance(warning, Warned)
    assert step.telemetry == {"gpu_power_watts": 550.0}
    assert (warning.step, warning.about, warning.message) == (2, "gpu", "GPU telemetry is off")


def test_on_the_cpu_a_step_is_logged_at_once(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append).push(make_stats(1))
    assert [event.step for event in logged] == [1]


def test_on_a_gpu_a_step_is_logged_when_the_next_is_under_way(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    events = [LateTimestamp(CPU.device) for _ in range(3)]
    metrics = Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append)
    for step, event in enumerate(events, 1):
        metrics.push(make_stats(step, arrived=event))
        assert [event.step for event in logged] == list(range(1, step))
        assert event.waits == 0
    assert [event.waits for event in events] == [1, 1, 0]
    metrics.flush()
    assert [event.step for event in logged] == [1, 2, 3]


@pytest.mark.parametrize(
    ("log_freq", "steps"), [(3, [3, 6, 9, 12, 15, 18, 20]), (7, [7, 14, 20]), (20, [20]), (99, [20])]
)
def test_the_log_frequency_thins_the_steps_and_keeps_the_last(plan: TrainPlan, log_freq: int, steps: list[int]) -> None:
    logged: list[StepLogged] = []
    metrics = Metrics(plan, log_freq, SpikeDetector(GuardConfig()), logged.append)
    for step in range(1, 21):
        metrics.push(make_stats(step))
        metrics.flush()
    assert [event.step for event in logged] == steps


def test_speed_is_tokens_per_second_of_training(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    started = time.perf_counter()
    metrics = Metrics(plan, 4, SpikeDetector(GuardConfig()), logged.append)
    for step in range(1, 9):
        metrics.push(make_stats(step, seconds=0.005))
    elapsed = time.perf_counter() - started
    seconds = sum(4 * plan.tokens_per_step / event.tokens_per_second for event in logged)
    assert 8 * 0.005 <= seconds <= elapsed


def test_operations_are_those_of_each_step_s_windows_shared_by_the_ranks(plan: TrainPlan) -> None:
    """Half of the logged steps are in the stage of short windows."""
    logged: list[StepLogged] = []
    stages = {"context_warmup": (Stage(8, 2),), "stage_flops": (1e9,), "flops_per_token": 3e9}
    two = replace(plan, **stages, ranks=2, peak_flops_per_second=5e14)
    metrics = Metrics(two, 4, SpikeDetector(GuardConfig()), logged.append)
    for step in range(1, 9):
        metrics.push(make_stats(step, seconds=0.001))
    first, second = logged
    assert first.tflops == pytest.approx(first.tokens_per_second * 2e9 / 2 / 1e12)
    assert second.tflops == pytest.approx(second.tokens_per_second * 3e9 / 2 / 1e12)
    assert [event.mfu for event in logged] == [pytest.approx(event.tflops / 500) for event in logged]


def test_without_a_known_peak_there_are_operations_and_no_mfu(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append).push(make_stats(1))
    assert logged[0].tflops == pytest.approx(logged[0].tokens_per_second * plan.flops_per_token / 1e12)
    assert logged[0].tflops > 0
    assert logged[0].mfu is None


def test_time_between_two_steps_counts_as_training_and_an_evaluation_does_not(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    metrics = Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append)
    metrics.push(make_stats(1))
    time.sleep(0.1)
    metrics.push(make_stats(2))
    assert plan.tokens_per_step / logged[-1].tokens_per_second >= 0.1
    time.sleep(0.1)
    started = time.perf_counter()
    metrics.restart_clock()
    metrics.push(make_stats(3))
    assert plan.tokens_per_step / logged[-1].tokens_per_second <= time.perf_counter() - started


def test_the_time_left_shrinks_to_nothing(plan: TrainPlan) -> None:
    logged: list[StepLogged] = []
    metrics = Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append)
    for step in range(1, 21):
        metrics.push(make_stats(step))
    assert all(event.seconds_left > 0 for event in logged[:-1])
    assert logged[-1].seconds_left == 0
    assert logged[0].seconds_left == pytest.approx(19 * plan.tokens_per_step / logged[0].tokens_per_second)


@pytest.mark.parametrize("log_freq", [1, 10])
def test_the_wish_to_stop_is_seen_and_not_forgotten(plan: TrainPlan, log_freq: int) -> None:
    metrics = Metrics(plan, log_freq, SpikeDetector(GuardConfig()), lambda _event: None)
    metrics.push(make_stats(1))
    assert not metrics.stop_requested
    metrics.push(make_stats(2, stop=True))
    assert metrics.stop_requested
    metrics.push(make_stats(3))
    assert metrics.stop_requested


@pytest.mark.parametrize(
    ("norm", "loss", "expected"),
    [(1.0, 2.0, False), (math.nan, 2.0, True), (math.inf, 2.0, True), (math.nan, math.nan, False)],
)
def test_gradients_that_alone_are_bad_are_told_apart_from_a_bad_loss(
    plan: TrainPlan, norm: float, loss: float, expected: bool
) -> None:
    metrics = Metrics(plan, 1, SpikeDetector(GuardConfig()), lambda _event: None)
    assert not metrics.has_bad_gradients_only
    metrics.push(replace(make_stats(1), values=torch.tensor([norm, 1.0, 0.0, loss, loss])))
    assert metrics.has_bad_gradients_only == expected
