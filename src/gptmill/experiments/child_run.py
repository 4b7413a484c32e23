"""A training run as a child process: how it is started, and followed by its event log.

Does not import torch, since the supervisor has to survive whatever can go wrong there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import IO

from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_last_step
from gptmill.runtime.child import open_child

PROGRAM = (sys.executable, "-m", "gptmill", "train")
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 5.0
STARTUP_SECONDS = 30.0  # between two progress lines of a run that has not logged its first step

Say = Callable[[str], None]


def open_child_run(
    arguments: Sequence[str],
    stdout: int | IO[bytes],
    stderr: IO[bytes],
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Starts `gptmill train`; the process outlives neither the context nor this process, and ignores Ctrl-C."""
    return open_child([*PROGRAM, *arguments], stdout, stderr, environment)


def follow_run(
    process: subprocess.Popen[bytes],
    run: RunDirectory,
    last_step: int,
    say: Say,
    is_due: Callable[[], bool] = lambda: False,
    poll_seconds: float = POLL_SECONDS,
) -> bool:
    """Reports the run's progress until it ends, returning False, or until `is_due`, returning True."""
    first = reported_step = read_last_step(run.events)
    first_step_at = reported_at = 0.0
    opened_at = startup_reported_at = time.monotonic()
    while process.poll() is None:
        if is_due():
            return True
        now, step = time.monotonic(), read_last_step(run.events)
        if step != first and not first_step_at:  # the time before was loading, preparing and compiling
            first, first_step_at = step, now
        if step > max(first, reported_step) and now - reported_at >= PROGRESS_SECONDS:
            reported_at, reported_step = now, step
            left = timedelta(seconds=round((now - first_step_at) / (step - first) * max(0, last_step - step)))
            say(f"  step {step:,} of {last_step:,}, about {left} left")
        if not first_step_at and now - startup_reported_at >= STARTUP_SECONDS:
            startup_reported_at = now
            say(f"  still loading, preparing or compiling after {now - opened_at:.0f} s")
        time.sleep(poll_seconds)
    return False


@contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM and SIGHUP too, so that children and folders are cleaned up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
