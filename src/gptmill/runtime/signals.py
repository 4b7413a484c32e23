"""The wish to stop, as a flag that the loop looks at when it is safe to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopFlag:
    """Which signal asked the run to stop; 0 while none has."""

    signal_number: int = 0

    def __bool__(self) -> bool:
        return self.signal_number != 0


@contextmanager
def listen_for_stop() -> Iterator[StopFlag]:
    """Turns the first Ctrl-C, SIGTERM or lost connection into the flag; a second Ctrl-C interrupts at once.

    A terminal's Ctrl-C under torchrun reaches a rank twice, as SIGINT and then as torchrun's SIGTERM: the
    second of these must not cut the save short.
    """
    flag = StopFlag()
    was_interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if number == signal.SIGINT and was_interrupted:
            signal.default_int_handler(number, frame)
        was_interrupted = was_interrupted or number == signal.SIGINT
        flag.signal_number = flag.signal_number or number

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # a lost connection; ignored already under nohup
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
