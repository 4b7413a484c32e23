"""Stragglers: how long each rank's own part of a step takes, and the warning that names one that the others wait for.

Ranks run in lockstep, so that their steps take equally long. What tells them apart is the time from the start of a step
to the last backward pass, in which gradients are exchanged for the first time.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

import torch

from gptmill.runs.events import StepLogged
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.watchdog import Watchdog
from gptmill.runtime.world import World
from gptmill.training.alarm import MIN_SECONDS, Alarm
from gptmill.training.learning_checks import Check

REMEMBERED_STEPS = 50
FINE_FRACTION = 0.5  # of the excess over the others at which a rank is fine again
MIN_SHARE = 0.05  # of a step that is lost by waiting; less is not worth a warning

ReadBusy = Callable[[], Mapping[str, float]]
"""Seconds by the name of the rank, with its host."""


class BusyTimer:
    """Times this rank's own part of each step, on the device's timeline and one step late: it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark: DeviceTimestamp | None = None
        self._pending: tuple[DeviceTimestamp, DeviceTimestamp] | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    @property
    def median_seconds(self) -> float:
        """0 before the first step."""
        return median(self._seconds) if self._seconds else 0.0

    def mark(self) -> None:
        """Call before each backward pass; the last one of a step counts."""
        self._mark = DeviceTimestamp(self._device)

    def add(self, started: DeviceTimestamp) -> None:
        """Call after each step, when the device has done the step before."""
        if self._pending is not None:
            start, end = self._pending
            end.wait()  # reached long ago, unless the step was rolled back before its metrics were read
            self._seconds.append(end.seconds_after(start))
        self._pending = None if self._mark is None else (started, self._mark)


class StragglerCheck(Check):
    """Whether a rank keeps the others waiting. Only rank 0 knows all of them."""

    about = "straggler"

    def __init__(self, factor: float, read_busy: ReadBusy) -> None:
        self._factor, self._read_busy = factor, read_busy
        self._slow_since: dict[str, float] = {}
        self._alarms: dict[str, Alarm] = {}

    def reset(self) -> None:
        self._slow_since.clear()

    def see_step(self, event: StepLogged) -> str:
        busy = {rank: seconds for rank, seconds in self._read_busy().items() if seconds > 0}
        if len(busy) < 2:
            return ""
        slowest = max(busy, key=busy.__getitem__)
        others = median(seconds for rank, seconds in busy.items() if rank != slowest)
        excess, step_seconds = busy[slowest] - others, event.seconds / max(1, event.steps)
        is_slow = busy[slowest] > self._factor * others and excess > MIN_SHARE * step_seconds
        since = self._slow_since.get(slowest, event.time) if is_slow else event.time
        self._slow_since = {slowest: since} if is_slow else {}
        if not self._sounds(busy, slowest, others, event.time, is_bad=is_slow and event.time - since >= MIN_SECONDS):
            return ""
        return (
            f"{slowest} is a straggler: its own part of a step takes {1000 * busy[slowest]:,.0f} ms, "
            f"{busy[slowest] / others:.1f} times the {1000 * others:,.0f} ms of the others, which wait for it; look "
            f"for other programs, slow storage and a hot GPU there"
        )

    def _sounds(self, busy: Mapping[str, float], slowest: str, others: float, time: float, *, is_bad: bool) -> bool:
        fine = others * (1 + FINE_FRACTION * (self._factor - 1))
        for rank, alarm in self._alarms.items():
            if rank != slowest:
                alarm.check(is_bad=False, is_fine=True, time=time)
        alarm = self._alarms.setdefault(slowest, Alarm())
        return alarm.check(is_bad=is_bad, is_fine=busy[slowest] < fine, time=time)


def make_busy_reader(world: World, watchdog: Watchdog) -> ReadBusy | None:
    """Reads what the ranks last said, from memory; None where there is no other rank to compare with."""
    ranks = world.ranks
    if ranks is None or world.size == 1 or not world.is_main:
        return None
    watch, own_name = ranks.watch, f"rank 0 on {socket.gethostname()}"

    def read_busy() -> dict[str, float]:
        others = {f"rank {rank} on {beat.host}": beat.busy_seconds for rank, beat in watch.watched_beats.items()}
        return {own_name: watchdog.busy_seconds, **others}

    return read_busy
