"""A run's energy is the integral of its power over the time of each process."""

from __future__ import annotations

import pytest

from gptmill.runs.energy import sum_energy
from gptmill.runs.events import EvalDone, Event, RunStarted, StepLogged


def make_start(step: int, time: float) -> RunStarted:
    return RunStarted(step, "runs/a", 9, 128, 999, "GPU", "bf16", 1, "x", "byte", "0", "2", None, time=time)


def make_step(step: int, time: float, watts: float | None) -> StepLogged:
    telemetry = {} if watts is None else {"gpu_power_watts": watts}
    return StepLogged(step, 0.0, 2.0, 1e-3, 1.0, 1e3, 0.0, telemetry=telemetry, time=time)


def test_energy_is_power_over_time_without_the_time_between_processes() -> None:
    events: list[Event] = [
        make_start(0, 1000.0),
        make_step(1, 1036.0, 100.0),
        EvalDone(1, 2.0, 64, 30.0, time=1066.0),
        make_step(2, 1072.0, 200.0),
        make_start(2, 9000.0),
        make_step(3, 9018.0, 400.0),
    ]
    assert sum_energy(events) == pytest.approx(1.0 + 2.0 + 2.0)


def test_what_was_not_measured_has_no_energy() -> None:
    assert sum_energy([make_start(0, 0.0), make_step(1, 10.0, None)]) is None
    assert sum_energy([]) is None


def test_a_clock_that_was_set_back_takes_no_energy_away() -> None:
    events = [make_start(0, 100.0), make_step(1, 136.0, 100.0), make_step(2, 90.0, 100.0)]
    assert sum_energy(events) == pytest.approx(1.0)
