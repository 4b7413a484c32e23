"""Telemetry reads means without waiting, and a meter that fails goes quiet with one warning."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from gptmill.runtime.telemetry import MAX_FAILURES, STALE_SECONDS, Telemetry, open_telemetry, sample_until
from gptmill.runtime.world import World


class Ticks(threading.Event):
    """Stops the sampling after some rounds, without waiting for any."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1.0
        self.rounds -= 1
        return self.rounds == 0


def test_a_read_gives_the_means_since_the_last_one() -> None:
    telemetry = Telemetry()
    assert telemetry.read() == {}
    telemetry.add({"watts": 100.0, "celsius": 50.0})
    telemetry.add({"watts": 200.0})
    assert telemetry.read() == {"watts": 150.0, "celsius": 50.0}
    assert telemetry.read() == {"watts": 200.0}


def test_a_driver_that_hangs_leaves_no_old_numbers_behind() -> None:
    now = [100.0]
    telemetry = Telemetry(clock=lambda: now[0])
    telemetry.add({"watts": 100.0})
    now[0] += STALE_SECONDS
    assert telemetry.read() == {"watts": 100.0}
    now[0] += 1
    assert telemetry.read() == {}


def fail_after(rounds: int, error: Exception) -> Callable[[], dict[str, float]]:
    """A meter that works for some rounds, and never again."""
    left = [rounds]

    def measure() -> dict[str, float]:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return {"watts": 1.0}

    return measure


@pytest.mark.parametrize(
    ("working", "rounds", "message"),
    [
        (5, 5, ""),
        (5, 4 + MAX_FAILURES, ""),
        (5, 20, "GPU telemetry is off for the rest of this process (GPU is lost); training is not affected"),
    ],
    ids=["works", "fails for a moment", "is lost"],
)
def test_a_meter_that_keeps_failing_is_left_out_with_one_warning(working: int, rounds: int, message: str) -> None:
    telemetry, gpu = Telemetry(), fail_after(working, RuntimeError("GPU is lost."))
    sample_until(Ticks(rounds), telemetry, {"GPU": lambda: gpu, "host memory": lambda: lambda: {"gb": 2.0}})
    assert telemetry.read() == {"watts": 1.0, "gb": 2.0}
    assert telemetry.take_warnings() == [message] * bool(message)
    assert telemetry.take_warnings() == []
    if message:
        telemetry.add({"gb": 2.0})
        assert telemetry.read() == {"gb": 2.0}


def test_a_meter_that_cannot_be_opened_is_left_out_with_one_warning() -> None:
    def open_meter() -> Callable[[], dict[str, float]]:
        raise ImportError("the driver and its\nlibrary differ")

    telemetry = Telemetry()
    sample_until(Ticks(2), telemetry, {"GPU": open_meter, "host memory": lambda: lambda: {"gb": 2.0}})
    assert telemetry.read() == {"gb": 2.0}
    (warning,) = telemetry.take_warnings()
    assert "the driver and its library differ" in warning


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_samples_in_a_thread_that_ends_with_the_run(rank: int) -> None:
    with open_telemetry(World(rank, 2, torch.device("cpu"))):
        names = [thread.name for thread in threading.enumerate()]
        assert ("telemetry" in names) == (rank == 0)
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]
