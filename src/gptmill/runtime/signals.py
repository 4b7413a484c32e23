"""The wish to stop, as a flag that the loop looks at when it is safe to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from gptmill.config import exit_codes

OTHERS_SIGNAL = signal.SIGTERM  # what a rank calls it that was not asked itself


@dataclass
class StopFlag:
    """True once a signal has asked the run to stop or its time is nearly up, and from then on."""

    signal_number: int = 0
    """The first signal that asked; 0 while none has."""
    deadline: float | None = None
    """When the run must have ended, on time.monotonic()."""
    margin_seconds: float = 0.0
    """How long before its deadline the run has to stop, so that it can still be saved."""
    _has_run_out: bool = field(default=False, init=False, repr=False)

    def __bool__(self) -> bool:
        return self.signal_number != 0 or self.is_time_up

    @property
    def is_time_up(self) -> bool:
        """Whether it was the time limit, and not a signal before it, that asked."""
        if self.deadline is not None and not self.signal_number and not self._has_run_out:
            self._has_run_out = time.monotonic() >= self.deadline - self.margin_seconds
        return self._has_run_out

    def describe(self) -> str:
        """What asked, to be read after "stopped". Where nothing has, another rank was asked."""
        if self.is_time_up:
            return "by its time limit"
        return f"by {signal.Signals(self.signal_number or OTHERS_SIGNAL).name}"

    @property
    def exit_code(self) -> int:
        """What a process ends with that has stopped for this."""
        if self.is_time_up:
            return exit_codes.TIME_UP
        return 128 + (self.signal_number or OTHERS_SIGNAL)


@contextmanager
def listen_for_stop(deadline: float | None = None) -> Iterator[StopFlag]:
    """Turns the first Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 or lost connection into the flag; the deadline too.

    A second Ctrl-C interrupts at once, and nothing else does. A terminal's Ctrl-C under torchrun reaches a rank
    twice, as SIGINT and then as torchrun's SIGTERM: the second of these must not cut the save short.
    """
    flag = StopFlag(deadline=deadline)
    was_interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if number == signal.SIGINT and was_interrupted:
            signal.default_int_handler(number, frame)
        was_interrupted = was_interrupted or number == signal.SIGINT
        flag.signal_number = flag.signal_number or number

    previous = {number: signal.signal(number, handle) for number in list_stop_signals()}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def list_stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to save and stop; schedulers send SIGUSR1 or SIGUSR2 some time before they kill."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # A lost connection is ignored already under nohup.
    is_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (is_ignored and number == signal.SIGHUP)]
