"""Graceful stop: signals (Ctrl-C, preemption) and time limits set a flag that the loop checks between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from gptmill.config import exit_codes

DEFAULT_SIGNAL = signal.SIGTERM  # reported by a rank that stops because another one was signalled


@dataclass
class StopFlag:
    """Becomes true, for good, once a signal has arrived or the deadline is near."""

    signal_number: int = 0
    """The first signal received; 0 before."""
    deadline: float | None = None
    """When the process must have exited, on time.monotonic()."""
    margin_seconds: float = 0.0
    """How long before the deadline to stop, so that the state can still be saved."""
    _is_past_deadline: bool = field(default=False, init=False, repr=False)

    def __bool__(self) -> bool:
        return self.signal_number != 0 or self.is_time_up

    @property
    def is_time_up(self) -> bool:
        """Whether the time limit, and not an earlier signal, is the reason to stop."""
        if self.deadline is not None and not self.signal_number and not self._is_past_deadline:
            self._is_past_deadline = time.monotonic() >= self.deadline - self.margin_seconds
        return self._is_past_deadline

    def take_over(self, signal_number: int, *, is_time_up: bool) -> None:
        """Stops for the reason of another rank."""
        self.signal_number, self._is_past_deadline = signal_number, is_time_up

    def describe(self) -> str:
        """The reason, to follow the word "stopped". Without a reason of its own, another rank was signalled."""
        if self.is_time_up:
            return "by its time limit"
        return f"by {signal.Signals(self.signal_number or DEFAULT_SIGNAL).name}"

    @property
    def exit_code(self) -> int:
        """The exit code of a process that stops for this reason."""
        if self.is_time_up:
            return exit_codes.TIME_UP
        return 128 + (self.signal_number or DEFAULT_SIGNAL)


@contextmanager
def listen_for_stop(deadline: float | None = None) -> Iterator[StopFlag]:
    """Sets the flag on SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP, and near the deadline.

    Only a second Ctrl-C interrupts at once. Under torchrun a Ctrl-C reaches each rank twice, as SIGINT and then as
    torchrun's SIGTERM: the latter must not interrupt the save. A thread other than the main one can handle no signals
    and leaves them to the program.
    """
    flag = StopFlag(deadline=deadline)
    was_interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if number == signal.SIGINT and was_interrupted:
            signal.default_int_handler(number, frame)
        was_interrupted = was_interrupted or number == signal.SIGINT
        flag.signal_number = flag.signal_number or number

    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handle) for number in list_stop_signals() if is_main}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python


def list_stop_signals() -> list[signal.Signals]:
    """The signals that request a save and stop; schedulers send SIGUSR1 or SIGUSR2 ahead of preemption."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # nohup ignores SIGHUP already; keep it so.
    is_ignored = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (is_ignored and number == signal.SIGHUP)]
