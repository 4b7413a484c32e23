"""A child process that gets each signal which this process gets, and whose last words are kept."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import IO

from gptmill.runtime.signals import list_stop_signals

POLL_SECONDS = 0.05
KEPT_LINES = 40
MAX_INTERRUPTS = 3
PIPE_SECONDS = 5.0
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, negative for the signal that killed it, and its last words."""

    code: int
    last_lines: list[str]


def run_child(command: list[str], relay: Relay) -> Ended:
    """Runs it to its end. Standard output is this process' own; standard error is shown and its end kept."""
    sys.stdout.flush()
    # The child has a process group of its own. So every signal, be it Ctrl-C of the terminal or one that was sent
    # to this process alone, reaches it exactly once, by the relay; in one group Ctrl-C would come twice, which
    # means "at once". And whatever the child leaves behind can be ended with it.
    # In the background of the terminal it may write but not read: it has no standard input.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0 if os.name == "posix" else None,
        preexec_fn=make_preparation(signal.SIGTERM),
    )
    assert child.stderr is not None
    last_lines: deque[str] = deque(maxlen=KEPT_LINES)
    passing = threading.Thread(target=_pass_on, args=(child.stderr, last_lines), daemon=True)
    passing.start()
    with relay.hold(child):
        code = child.wait()
    _signal_group(child, "SIGKILL")  # workers that it left would hold its locks and its memory
    passing.join(PIPE_SECONDS)
    return Ended(code, list(last_lines))


@dataclass
class Relay:
    """Hands signals to the child, one for one; between two children it remembers that one has come."""

    asked: int = 0
    """The first signal that asked to stop; 0 while none has."""
    _child: subprocess.Popen[bytes] | None = None
    _waiting: list[int] = field(default_factory=list)
    _interrupts: int = 0

    @contextmanager
    def hold(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        self._child = child
        for number in self._waiting:
            child.send_signal(number)
        yield
        self._child = None

    def wait(self, seconds: float) -> bool:
        """Whether a signal came in that time."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return bool(self.asked)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number
        self._interrupts += number == signal.SIGINT
        if self._child is None:
            self._waiting.append(number)
        elif self._interrupts >= MAX_INTERRUPTS:
            self._child.kill()  # it did not listen to the second one
        elif os.name == "posix":  # elsewhere Ctrl-C reaches it without help
            self._child.send_signal(number)

    def pause(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the child's group stops with this process, and goes on with it."""
        child = self._child
        if child is not None:
            _signal_group(child, "SIGSTOP")
        signal.raise_signal(signal.SIGSTOP)
        if child is not None:
            _signal_group(child, "SIGCONT")


@contextmanager
def open_relay() -> Iterator[Relay]:
    """Catches the signals that ask a run to stop, and Ctrl-Z, for children to come."""
    relay = Relay()
    previous = {number: signal.signal(number, relay.handle) for number in list_stop_signals()}
    if os.name == "posix" and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, relay.pause)
    try:
        yield relay
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _pass_on(source: IO[bytes], last_lines: deque[str]) -> None:
    """Shows what the child says on standard error, and keeps the end of it."""
    with source:
        for line in source:
            last_lines.append(line.decode(errors="replace").rstrip())
            with suppress(OSError, ValueError):  # nobody may be listening
                os.write(2, line)


def make_preparation(death_signal: signal.Signals) -> Callable[[], None] | None:
    """What a child does before it becomes the program: on Linux, ask for this signal should this process be killed."""
    if sys.platform != "linux":
        return None
    return partial(_prepare_child, ctypes.CDLL(None, use_errno=True), os.getpid(), death_signal)


@contextmanager
def hold_back_signals() -> Iterator[None]:
    """Lets signals wait while a child is prepared: Python drops what they raise in the midst of forking.

    They are noted and raised again, not blocked: what one thread blocks comes to another. It is the main thread that
    answers them, so that others have nothing to hold back. A child that becomes another program answers as that does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    answered = [number for number in list_stop_signals() if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, _frame: noted.append(number)) for number in answered}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in noted:
            signal.raise_signal(each)


def _prepare_child(library: ctypes.CDLL, parent: int, death_signal: signal.Signals) -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else `stty tostop` would stop it at its first line
    library.prctl(SET_DEATH_SIGNAL, death_signal)
    if os.getppid() != parent:
        os._exit(128 + death_signal)


def _signal_group(child: subprocess.Popen[bytes], name: str) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, getattr(signal, name))
