"""Hang detection: each rank writes heartbeats, and a rank that hangs dumps its stacks and exits.

Knows no torch and no loop: the main thread reports what it is doing and how long steps take.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO, NamedTuple, Protocol, TypeVar

from gptmill.config import exit_codes
from gptmill.runtime.heartbeats import (
    BEAT_SECONDS,
    SILENT_SECONDS,
    Heartbeat,
    describe_hang,
    make_heartbeat_path,
    makes_progress,
    read_heartbeat,
    write_heartbeat,
)

POLL_SECONDS = BEAT_SECONDS
# The limit for the first step, whose duration is unknown and which may compile a large model for minutes.
FIRST_STEP_SECONDS = 1800.0
STEP_HISTORY = 50
PAUSE_POLLS = 10
STORAGE_TIMEOUT_SECONDS = 20.0
T = TypeVar("T")


class Beat(NamedTuple):
    """What a rank started doing, when, and after how many steps."""

    seconds: float
    step: int
    doing: str


class Peers(Protocol):
    """The other ranks, reached without the run's directory."""

    def read_heartbeats(self, silent_seconds: float) -> dict[int, Heartbeat | None]:
        """What each of them is doing; takes that long, to find out who is silent."""

    def is_ending(self) -> bool:
        """Whether one of them has failed, and this process is about to be ended for it."""

    def announce_hang(self, sentence: str) -> bool:
        """Ends them with this sentence; returns whether this rank is the one to print it."""


class Watchdog:
    """Receives the progress reports of the main thread. Both methods take microseconds."""

    def __init__(self, factor: float | None, min_seconds: float) -> None:
        self._factor = factor
        self._min_seconds = min_seconds
        self._step_seconds: deque[float] = deque(maxlen=STEP_HISTORY)
        self._median_seconds = math.nan
        self.busy_seconds = 0.0
        """How long this rank's own part of a step takes; 0 while it is unknown."""
        self.beat(0, "starting")

    def beat(self, step: int, doing: str) -> None:
        """Reports progress: after `step` steps the rank starts, or continues, `doing`."""
        # A single assignment, so that the monitoring threads never see a partial update.
        self.last_beat = Beat(time.monotonic(), step, doing)

    def note_step_seconds(self, seconds: float) -> None:
        """Records the duration of a step."""
        self._step_seconds.append(seconds)
        self._median_seconds = sorted(self._step_seconds)[len(self._step_seconds) // 2]

    @property
    def min_limit_seconds(self) -> float:
        """How long a rank may be silent, whatever its steps take; infinite if hang detection is off."""
        return math.inf if self._factor is None else self._min_seconds

    @property
    def limit_seconds(self) -> float:
        """How long the rank may go without progress; infinite if hang detection is off."""
        if self._factor is None:
            return math.inf
        if math.isnan(self._median_seconds):
            return max(FIRST_STEP_SECONDS, self._min_seconds)
        return max(self._min_seconds, self._factor * self._median_seconds)


@contextmanager
def open_watchdog(
    folder: Path,
    rank: int,
    world_size: int,
    factor: float | None,
    min_seconds: float,
    exit_process: Callable[[int], None] = os._exit,
    peers: Peers | None = None,
) -> Iterator[Watchdog]:
    """Writes heartbeats; if this process makes no progress for too long, dumps its stacks into `folder` and exits.

    The limit is `factor` times the median step, but at least `min_seconds`; without a factor there are only heartbeats.
    A rank that waits for another rank which makes progress does not hang. What the others do is known from `peers`, or
    else from the files in `folder`.
    """
    watchdog = Watchdog(factor, min_seconds)
    monitor = _Monitor(watchdog, folder, rank, world_size, exit_process, peers)
    # Two threads: unresponsive storage may block the heartbeats, and may itself be the cause of the hang.
    tasks = (monitor.write_heartbeats, monitor.detect_hang)
    threads = [Thread(target=task, daemon=True, name="watchdog") for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield watchdog
    finally:
        monitor.close()
        for thread in threads:
            thread.join(POLL_SECONDS)


class _Monitor:
    """The background threads of a watchdog."""

    def __init__(
        self,
        watchdog: Watchdog,
        folder: Path,
        rank: int,
        world_size: int,
        exit_process: Callable[[int], None],
        peers: Peers | None,
    ) -> None:
        self._watchdog = watchdog
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._exit_process = exit_process
        self._peers = peers
        self._closed = Event()
        self._timer_lock = Lock()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._stacks_file = self._open_stacks_file()

    def close(self) -> None:
        with self._timer_lock:
            self._closed.set()
            if self._stacks_file is not None:
                faulthandler.cancel_dump_traceback_later()
                self._stacks_file.close()

    def write_heartbeats(self) -> None:
        while True:
            with suppress(OSError):  # a full disk or a deleted directory is reported elsewhere
                write_heartbeat(self._folder, self._make_heartbeat(self._watchdog.last_beat))
            if self._closed.wait(POLL_SECONDS):
                return

    def detect_hang(self) -> None:
        """Exits the process once neither it nor any other rank has made progress for too long."""
        counted_from = polled_at = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now, beat, limit = time.monotonic(), self._watchdog.last_beat, self._watchdog.limit_seconds
            if now - polled_at > min(PAUSE_POLLS * POLL_SECONDS, max(2 * POLL_SECONDS, limit / 2)):
                counted_from = now  # the whole process was suspended: sleep, Ctrl-Z, a debugger
            polled_at = now
            self._restart_dump_timer(3 * limit)
            if now - max(beat.seconds, counted_from) <= limit:
                continue
            others = _call_within(STORAGE_TIMEOUT_SECONDS, self._read_others) or {}
            if not any(makes_progress(other, limit) for other in others.values()) and not self._is_ending():
                self._report(beat, others)
                self._exit_process(exit_codes.HUNG)
                return
            polled_at = time.monotonic()

    def _read_others(self) -> dict[int, Heartbeat | None]:
        if self._peers is not None:
            return self._peers.read_heartbeats(SILENT_SECONDS)
        return {rank: read_heartbeat(self._folder, rank) for rank in range(self._world_size) if rank != self._rank}

    def _make_heartbeat(self, beat: Beat) -> Heartbeat:
        since = time.monotonic() - beat.seconds
        return Heartbeat(self._rank, beat.step, beat.doing, since, time.time(), self._host, self._pid)

    def _report(self, beat: Beat, others: dict[int, Heartbeat | None]) -> None:
        """Prints what hangs, and writes it with all Python stacks into the run's directory."""
        hang = describe_hang(self._make_heartbeat(beat), others, lag_seconds=2 * POLL_SECONDS)
        sentence = f"gptmill: {hang}\n"
        # Not through sys.stderr, which a live display may have replaced and the hanging thread may have locked.
        if _call_within(STORAGE_TIMEOUT_SECONDS, lambda: self._announce(hang)) is not False:
            with suppress(OSError):
                os.write(2, sentence.encode(errors="replace"))
        path = self._folder / f"hang_step_{beat.step:06d}_rank_{self._rank:05d}.txt"
        if not _call_within(STORAGE_TIMEOUT_SECONDS, lambda: _write_stacks(path, sentence)):
            with suppress(OSError):
                faulthandler.dump_traceback(file=2, all_threads=True)

    def _is_ending(self) -> bool:
        """Whether this process is about to be ended because another rank has failed, which explains the hang."""
        return self._peers is not None and bool(_call_within(STORAGE_TIMEOUT_SECONDS, self._peers.is_ending))

    def _announce(self, hang: str) -> bool:
        """Whether this rank is to print it."""
        return self._peers is None or self._peers.announce_hang(hang)

    def _open_stacks_file(self) -> IO[str] | None:
        """A file for faulthandler, which can dump the stacks even if no Python thread can run.

        Its timer runs on while the process is suspended and cannot tell a hang from sleep: so it never exits the
        process, and is not used where a terminal can suspend it (Ctrl-Z).
        """
        if math.isinf(self._watchdog.limit_seconds) or sys.platform != "linux" or _has_terminal():
            return None
        with suppress(OSError):
            path = make_heartbeat_path(self._folder, self._rank, "stacks.txt")
            path.parent.mkdir(exist_ok=True)
            return path.open("a", encoding="utf-8")
        return None

    def _restart_dump_timer(self, seconds: float) -> None:
        """Dumps the stacks unless called again within `seconds`.

        Covers C code that never releases the GIL, such as an unresponsive driver, which blocks this thread as well.
        """
        with self._timer_lock:
            if self._stacks_file is not None and not self._closed.is_set():
                faulthandler.dump_traceback_later(seconds, exit=False, file=self._stacks_file)


def _write_stacks(path: Path, sentence: str) -> bool:
    """Writes the sentence and all stacks; returns whether that worked."""
    with suppress(OSError), path.open("w", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        return True
    return False


def _has_terminal() -> bool:
    """Whether a terminal can suspend this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _call_within(seconds: float, action: Callable[[], T]) -> T | None:
    """The action's result; None if it does not return in time, as with unresponsive storage."""
    results: list[T] = []
    thread = Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
