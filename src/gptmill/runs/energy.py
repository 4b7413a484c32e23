"""The energy that a run's GPUs took, from the power in its events."""

from __future__ import annotations

from collections.abc import Iterable

from gptmill.runs.events import Event, RunStarted, StepLogged

JOULES_PER_WATT_HOUR = 3600.0


def sum_energy(events: Iterable[Event]) -> float | None:
    """Watt-hours between the logged steps of each process, evaluations in between included; None if never measured.

    Covers the GPUs on the machine of rank 0, and only the steps that the run kept: a resumed run drops the others.
    """
    joules, before = None, None
    for event in events:
        if isinstance(event, StepLogged) and "gpu_power_watts" in event.telemetry and before is not None:
            seconds = max(0.0, event.time - before)
            joules = (joules or 0.0) + event.telemetry["gpu_power_watts"] * seconds
        if isinstance(event, StepLogged | RunStarted):
            before = event.time
    return None if joules is None else joules / JOULES_PER_WATT_HOUR
