"""Checks of the machine: each tells of a lasting change once, with numbers, and ignores short ones."""

from __future__ import annotations

from typing import Any

import pytest
from steps import make_noise, make_step, show

from gptmill.runs.events import EvalDone, Event
from gptmill.training.learning_checks import Check
from gptmill.training.machine_checks import (
    DataWaitCheck,
    EvalTimeCheck,
    MemoryCheck,
    MfuCheck,
    TemperatureCheck,
    ThrottlingCheck,
    ThroughputCheck,
    UtilizationCheck,
)


def make_series(levels: list[tuple[float, int]], field: str, seconds: float = 2.0, noise: float = 0.0) -> list[Event]:
    """So many steps at each level, with relative noise; fields of the telemetry by their names."""
    generator, values = make_noise(), [level for level, steps in levels for _ in range(steps)]
    events: list[Event] = []
    for step, level in enumerate(values, 1):
        value = level * (1 + noise * generator.uniform(-1, 1))
        is_telemetry = field.startswith(("gpu_", "host_"))
        fields: dict[str, Any] = {"telemetry": {field: value}} if is_telemetry else {field: value}
        events.append(make_step(step, seconds, **fields))
    return events


def test_a_drop_of_throughput_is_told_once_until_it_recovers() -> None:
    levels = [(10_000, 100), (5_000, 300), (10_000, 100), (5_000, 100)]
    first, second = show(ThroughputCheck(0.7), make_series(levels, "tokens_per_second", noise=0.1))
    assert first.about == second.about == "throughput"
    assert 105 < first.step < 120
    assert 505 < second.step < 520
    assert "% of its usual" in first.message


@pytest.mark.parametrize(
    ("levels", "seconds"),
    [
        ([(100, 3), (10_000, 300)], 2.0),
        ([(10_000, 100), (2_000, 6), (10_000, 100), (2_000, 6), (10_000, 50)], 2.0),
        ([(10_000, 1000), (2_000, 400), (10_000, 400)], 0.01),
        ([(10_000, 100), (8_000, 200)], 2.0),
        ([(10_000, 10), (5_000, 300)], 2.0),
    ],
    ids=["compiles first", "stumbles", "is fast and short", "slows a little", "has no usual yet"],
)
def test_throughput_that_varies_is_no_reason_to_warn(levels: list[tuple[float, int]], seconds: float) -> None:
    assert show(ThroughputCheck(0.7), make_series(levels, "tokens_per_second", seconds, noise=0.1)) == []


@pytest.mark.parametrize(
    ("check", "field", "fine", "bad", "words"),
    [
        (DataWaitCheck(0.1), "data_wait", 0.01, 0.25, "waiting for data"),
        (TemperatureCheck(85.0), "gpu_temperature_celsius", 70.0, 88.0, "the GPU has been at 8"),
        (ThrottlingCheck(0.1), "gpu_throttled_thermal", 0.0, 0.6, "heat slowed the GPU down for "),
        (ThrottlingCheck(0.1), "gpu_throttled_power", 0.0, 0.6, "its power supply slowed the GPU down for "),
        (UtilizationCheck(0.7), "gpu_utilization", 0.97, 0.4, "the GPU was busy for only "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lasts_is_told_once_and_what_passes_is_not(
    check: Check, field: str, fine: float, bad: float, words: str
) -> None:
    short = make_series([(fine, 100), (bad, 1), (fine, 100)], field)
    assert show(check, short) == []
    (warning,) = show(check, make_series([(fine, 50), (bad, 200)], field))
    assert warning.about == check.about
    assert 50 < warning.step <= 70
    assert words in warning.message


@pytest.mark.parametrize(
    "check", [MemoryCheck(0.95, None), TemperatureCheck(85.0), ThrottlingCheck(0.1), UtilizationCheck(0.7)]
)
def test_a_machine_that_measures_nothing_gets_no_warning(check: Check) -> None:
    assert show(check, [make_step(step, memory_gb=500.0) for step in range(100)]) == []


def test_memory_near_its_limit_is_told_for_the_gpu_and_for_the_host() -> None:
    check = MemoryCheck(0.95, int(80e9))
    (device,) = show(check, make_series([(60.0, 20), (77.5, 50)], "memory_gb"))
    assert "77.5 of the GPU's 80.0 GB" in device.message
    (host,) = show(check, make_series([(0.5, 20), (0.97, 30), (0.94, 30), (0.97, 30)], "host_memory_used"))
    assert "97% of the host's memory" in host.message
    assert {device.about, host.about} == {"memory"}


def test_samples_of_an_evaluation_say_nothing_of_training() -> None:
    """Every fifth step comes after an evaluation, whose low utilisation is in its samples and in the next one's."""
    events: list[Event] = []
    for step in range(200):
        if step % 5 == 0:
            events.append(EvalDone(step, 3.0, 64, 1.0, time=1e6 + 2 * step - 1))
        busy = 0.1 if step % 5 < 2 else 0.97
        events.append(make_step(step, telemetry={"gpu_utilization": busy}))
    assert show(UtilizationCheck(0.7), events) == []


def test_an_idle_gpu_waits_for_data_or_for_the_host() -> None:
    def idle(data_wait: float) -> str:
        telemetry = {"gpu_utilization": 0.4}
        steps = [make_step(step, data_wait=data_wait, telemetry=telemetry) for step in range(60)]
        (warning,) = show(UtilizationCheck(0.7, "add --compile, which is off"), steps)
        return warning.message

    assert "waited for data for 60% of the last step: put the shards on a faster local disk (SSD)" in idle(0.6)
    assert "because the host does not launch its kernels fast enough: add --compile, which is off" in idle(0.05)


def test_a_busy_gpu_far_below_its_peak_is_told_and_an_idle_one_is_not() -> None:
    def see(mfu: float | None, busy: float) -> list[str]:
        steps = [make_step(step, mfu=mfu, telemetry={"gpu_utilization": busy}) for step in range(60)]
        return [warning.message for warning in show(MfuCheck(0.1, "raise --mini_batch_size"), steps)]

    (said,) = see(0.03, 0.97)
    assert "the GPU is busy but reaches 3.0% of its peak FLOP/s (10,000 tokens/s)" in said
    assert see(0.4, 0.97) == see(0.03, 0.3) == see(None, 0.97) == []


def test_an_evaluation_that_takes_far_longer_than_usual_is_told() -> None:
    """From 1.4 s to 12.2 s, as on a GPU that throttles."""
    seconds = [1.4, 1.5, 1.4, 4.9, 1.4, 12.2, 12.1, 1.4]
    events: list[Event] = [EvalDone(100 * n, 3.0, 64, took, time=1e6 + n) for n, took in enumerate(seconds)]
    (warning,) = show(EvalTimeCheck(3.0), events)
    assert (warning.about, warning.step) == ("evaluation", 500)
    assert "took 12.2 s, 8.7 times its usual 1.4 s" in warning.message
