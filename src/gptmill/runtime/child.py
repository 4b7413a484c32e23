"""Child processes that die with this process: one that receives this process's signals, or one that runs apart.

Knows nothing of what the children do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from gptmill.runtime.signals import list_stop_signals

NAP_SECONDS = 1.0
POLL_SECONDS = 0.05
KEPT_LINES = 40
MAX_INTERRUPTS = 3
PIPE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
MAX_OOM_SCORE = "1000"


@dataclass(frozen=True)
class ChildExit:
    """How a child ended: its exit code, negative for the signal that killed it, and its last lines on stderr."""

    code: int
    last_lines: list[str]


def describe_exit(code: int) -> str:
    """Describes an exit code, negative for a signal: "exit code 1" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def run_child(command: Sequence[str], relay: SignalRelay) -> ChildExit:
    """Runs a command to its end, sharing stdout; its stderr is passed through, and the last lines of it are kept."""
    sys.stdout.flush()
    # The child gets its own process group, so that every signal, be it Ctrl-C from the terminal or one sent to this
    # process alone, reaches it exactly once, through the relay; in a shared group, Ctrl-C would arrive twice, which
    # means "stop at once". The group also lets us kill whatever the child leaves behind.
    # A background process group may write to the terminal but not read from it, hence no standard input.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0 if os.name == "posix" else None,
        preexec_fn=_make_preexec(signal.SIGTERM),
    )
    assert child.stderr is not None
    last_lines: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_forward_stderr, args=(child.stderr, last_lines), daemon=True)
    reader.start()
    with relay.attach(child):
        code = _wait(child)
    _signal_group(child, "SIGKILL")  # orphaned workers would keep its locks and its memory
    reader.join(PIPE_SECONDS)
    return ChildExit(code, list(last_lines))


@contextmanager
def open_child(
    command: Sequence[str],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in its own session, out of reach of Ctrl-C, and kills it when the context is left.

    It is killed with this process too, and is the first that Linux kills when memory runs out.
    """
    preexec, process = _make_preexec(signal.SIGKILL), None
    try:
        with _defer_signals():
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                preexec_fn=preexec,
            )
        with suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(MAX_OOM_SCORE, encoding="ascii")
        yield process
    finally:
        if process is not None:
            kill_child(process)


def kill_child(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a process group, together with that group, and waits for it."""
    if process.poll() is None:
        _signal_group(process, "SIGKILL")
        process.kill()
    process.wait()


@dataclass
class SignalRelay:
    """Forwards each signal to the child once; between two children it remembers the signals that came."""

    received: int = 0
    """The first signal that asked to stop; 0 if there was none."""
    _child: subprocess.Popen[bytes] | None = None
    _pending: list[int] = field(default_factory=list)
    _interrupts: int = 0

    @contextmanager
    def attach(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Forwards signals to this child, the pending ones first."""
        self._child = child
        for number in self._pending:
            child.send_signal(number)
        yield
        self._child = None

    def wait(self, seconds: float) -> bool:
        """Waits that long, or until a signal comes; returns whether one has come."""
        deadline = time.monotonic() + seconds
        while not self.received and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return bool(self.received)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler for requests to stop."""
        self.received = self.received or number
        self._interrupts += number == signal.SIGINT
        if self._child is None:
            self._pending.append(number)
        elif self._interrupts >= MAX_INTERRUPTS:
            self._child.kill()  # it did not react to the second one
        elif os.name == "posix":  # on Windows, Ctrl-C reaches the child directly
            self._child.send_signal(number)

    def suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler for Ctrl-Z: suspends the child's group with this process, and resumes both."""
        child = self._child
        if child is not None:
            _signal_group(child, "SIGSTOP")
        signal.raise_signal(signal.SIGSTOP)
        if child is not None:
            _signal_group(child, "SIGCONT")


@contextmanager
def open_relay() -> Iterator[SignalRelay]:
    """Catches the signals that ask a run to stop, and Ctrl-Z, on behalf of the children to come."""
    relay = SignalRelay()
    previous = {number: signal.signal(number, relay.handle) for number in list_stop_signals()}
    if os.name == "posix" and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, relay.suspend)
    try:
        yield relay
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Waits in short naps: a signal that came just before one long system call would be handled after it."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(NAP_SECONDS)


def _forward_stderr(source: IO[bytes], last_lines: deque[str]) -> None:
    with source:
        for line in source:
            last_lines.append(line.decode(errors="replace").rstrip())
            with suppress(OSError, ValueError):  # stderr may be closed
                os.write(2, line)


def _make_preexec(death_signal: signal.Signals) -> Callable[[], None] | None:
    """On Linux, a function for the forked child that requests this signal for when its parent dies."""
    if sys.platform != "linux":
        return None
    return partial(_prepare_child, ctypes.CDLL(None, use_errno=True), os.getpid(), death_signal)


def _prepare_child(library: ctypes.CDLL, parent: int, death_signal: signal.Signals) -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else `stty tostop` would stop it at its first line
    library.prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before prctl
        os._exit(128 + death_signal)


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Defers signals while a child is forked: Python drops exceptions raised by a handler in the middle of a fork.

    They are recorded and raised again, not blocked, since another thread would receive what one thread blocks. Only
    the main thread runs handlers, so other threads have nothing to defer. The child's exec resets the handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[int] = []
    handled = [number for number in list_stop_signals() if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, _frame: deferred.append(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in deferred:
            signal.raise_signal(each)


def _signal_group(child: subprocess.Popen[bytes], name: str) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, getattr(signal, name))
