"""Telemetry: a thread samples the machine once a second; training reads means and never waits.

Rank 0 samples all GPUs that the run uses on its machine, which needs no communication between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock, Thread

from gptmill.runtime.cpu_usage import CpuMeter, list_cpus
from gptmill.runtime.gpu_usage import find_gpus, open_gpu_meter
from gptmill.runtime.host_usage import read_host_usage
from gptmill.runtime.world import World

SAMPLE_SECONDS = 1.0
STALE_SECONDS = 10.0  # a driver that hangs leaves old samples behind, which no longer describe the run
MAX_FAILURES = 3  # consecutive ones, after which a meter is given up
CLOSE_SECONDS = 2.0
DIGITS = 4

Meter = Callable[[], dict[str, float]]
"""Measures now; raises whatever its library raises."""
OpenMeter = Callable[[], Meter]


class Telemetry:
    """The samples that the run has not read yet, shared by the sampling thread and the training loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._unread: list[dict[str, float]] = []
        self._latest: dict[str, float] = {}
        self._sampled_at = 0.0
        self._warnings: list[str] = []

    def add(self, sample: dict[str, float]) -> None:
        with self._lock:
            self._unread.append(sample)
            self._latest, self._sampled_at = sample, self._clock()

    def warn(self, message: str) -> None:
        with self._lock:
            self._warnings.append(message)

    def read(self) -> dict[str, float]:
        """The mean of each quantity since the last read; the latest sample if none is newer, and nothing if it is old.

        A quantity that could not be measured is absent.
        """
        with self._lock:
            samples, self._unread = self._unread or [self._latest], []
            is_stale = self._clock() - self._sampled_at > STALE_SECONDS
        return {} if is_stale else average(samples)

    def take_warnings(self) -> list[str]:
        """Returns what went wrong since the last call."""
        with self._lock:
            warnings, self._warnings = self._warnings, []
        return warnings


def average(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each quantity over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    return {name: round(sum(found) / len(found), DIGITS) for name, found in values.items()}


@contextmanager
def open_telemetry(world: World) -> Iterator[Telemetry]:
    """Samples in a daemon thread on rank 0, whose events are logged; other ranks measure nothing."""
    if not world.is_main:
        yield Telemetry()
        return
    openers: dict[str, OpenMeter] = {"host memory": lambda: read_host_usage}
    if gpus := find_gpus(world.device):
        openers["GPU"] = lambda: open_gpu_meter(gpus)
    if world.device.type == "cpu":
        openers["host CPU"] = lambda: CpuMeter(list_cpus())
    telemetry, stop = Telemetry(), Event()
    thread = Thread(target=sample_until, args=(stop, telemetry, openers), name="telemetry", daemon=True)
    thread.start()
    try:
        yield telemetry
    finally:
        stop.set()
        thread.join(CLOSE_SECONDS)  # no longer: a lost GPU may block its driver for good


def sample_until(
    stop: Event, telemetry: Telemetry, openers: dict[str, OpenMeter], seconds: float = SAMPLE_SECONDS
) -> None:
    """Opens the meters and samples them until told to stop. One that fails repeatedly is reported and left out."""
    meters: dict[str, Meter] = {}
    for name, open_meter in openers.items():
        try:
            meters[name] = open_meter()
        except Exception as error:  # telemetry never hurts the run
            telemetry.warn(describe_failure(name, error))
    failures = dict.fromkeys(meters, 0)
    while meters:
        sample: dict[str, float] = {}
        for name, measure in list(meters.items()):
            try:
                sample.update(measure())
                failures[name] = 0
            except Exception as error:
                failures[name] += 1
                if failures[name] >= MAX_FAILURES:
                    del meters[name]
                    telemetry.warn(describe_failure(name, error))
        telemetry.add(sample)
        if stop.wait(seconds):
            return


def describe_failure(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{name} telemetry is off for the rest of this process ({reason}); training is not affected"
