"""A watch over each rank: heartbeats that others can read, and an end with all stacks for one that hangs.

Knows no torch and no loop: it is told what the rank does, and when a step has taken how long.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO, NamedTuple, TypeVar

from gptmill.config import exit_codes

POLL_SECONDS = 1.0
# Before the first step is done nothing is usual, and compiling a large model takes minutes.
FIRST_STEP_SECONDS = 1800.0
USUAL_STEPS = 50
PAUSE_POLLS = 10
SILENT_SECONDS = 4.0  # of heartbeats that come every second
STORAGE_SECONDS = 20.0
MAX_NAMED_RANKS = 4
T = TypeVar("T")


class Beat(NamedTuple):
    """What a rank began to do, when, and after how many steps."""

    seconds: float
    step: int
    doing: str


@dataclass(frozen=True)
class Heartbeat:
    """A rank's file: where it stands, and for how many seconds it has stood there."""

    rank: int
    step: int
    doing: str
    since: float
    time: float
    host: str
    pid: int

    def measure_silence(self, now: float) -> float:
        """Seconds since the file was written; clocks of other machines may be ahead."""
        return max(0.0, now - self.time)


class Watchdog:
    """What the main thread tells of itself. Both methods cost microseconds."""

    def __init__(self, factor: float | None, least_seconds: float) -> None:
        self._factor = factor
        self._least_seconds = least_seconds
        self._step_seconds: deque[float] = deque(maxlen=USUAL_STEPS)
        self._usual_seconds = math.nan
        self.beat(0, "starting")

    def beat(self, step: int, doing: str) -> None:
        """The rank has got somewhere: after `step` steps it begins, or goes on with, `doing`."""
        # One assignment, so that the watching thread never sees half of it.
        self.last_beat = Beat(time.monotonic(), step, doing)

    def note_step_seconds(self, seconds: float) -> None:
        """How long a step took."""
        self._step_seconds.append(seconds)
        self._usual_seconds = sorted(self._step_seconds)[len(self._step_seconds) // 2]

    @property
    def limit_seconds(self) -> float:
        """How long the rank may stand still; infinite where it is never ended."""
        if self._factor is None:
            return math.inf
        if math.isnan(self._usual_seconds):
            return max(FIRST_STEP_SECONDS, self._least_seconds)
        return max(self._least_seconds, self._factor * self._usual_seconds)


@contextmanager
def open_watchdog(
    folder: Path,
    rank: int,
    world_size: int,
    factor: float | None,
    least_seconds: float,
    end: Callable[[int], None] = os._exit,
) -> Iterator[Watchdog]:
    """Watches this process; one that stands still for too long writes its stacks into `folder` and ends.

    Too long is `factor` times the usual step, but at least `least_seconds`; with no factor it only gives heartbeats.
    A rank that waits for another one which gets on does not hang.
    """
    watchdog = Watchdog(factor, least_seconds)
    watch = _Watch(watchdog, folder, rank, world_size, end)
    # Two threads: storage that does not answer may hold the heartbeats up, and is what a rank may hang on.
    threads = [Thread(target=task, daemon=True, name="watchdog") for task in (watch.give_heartbeats, watch.judge)]
    for thread in threads:
        thread.start()
    try:
        yield watchdog
    finally:
        watch.close()
        for thread in threads:
            thread.join(POLL_SECONDS)


class _Watch:
    """The threads' side of it."""

    def __init__(
        self, watchdog: Watchdog, folder: Path, rank: int, world_size: int, end: Callable[[int], None]
    ) -> None:
        self._watchdog = watchdog
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._end = end
        self._closed = Event()
        self._setting = Lock()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._last_resort = self._open_last_resort()

    def close(self) -> None:
        with self._setting:
            self._closed.set()
            if self._last_resort is not None:
                faulthandler.cancel_dump_traceback_later()
                self._last_resort.close()

    def give_heartbeats(self) -> None:
        while True:
            with suppress(OSError):  # a full disk or a folder that is gone are for others to tell
                write_heartbeat(self._folder, self._make_heartbeat(self._watchdog.last_beat))
            if self._closed.wait(POLL_SECONDS):
                return

    def judge(self) -> None:
        """Ends the process once neither it nor any rank that it could wait for has got anywhere for too long."""
        counted_from = polled_at = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now, beat, limit = time.monotonic(), self._watchdog.last_beat, self._watchdog.limit_seconds
            if now - polled_at > min(PAUSE_POLLS * POLL_SECONDS, max(2 * POLL_SECONDS, limit / 2)):
                counted_from = now  # the whole process slept: a closed lid, Ctrl-Z, a debugger
            polled_at = now
            self._set_last_resort(3 * limit)
            if now - max(beat.seconds, counted_from) <= limit:
                continue
            others = _call_within(STORAGE_SECONDS, self._read_others) or {}
            if not any(_gets_on(other, limit) for other in others.values()):
                self._report(beat, others)
                self._end(exit_codes.HUNG)
                return
            polled_at = time.monotonic()

    def _read_others(self) -> dict[int, Heartbeat | None]:
        return {rank: read_heartbeat(self._folder, rank) for rank in range(self._world_size) if rank != self._rank}

    def _make_heartbeat(self, beat: Beat) -> Heartbeat:
        since = time.monotonic() - beat.seconds
        return Heartbeat(self._rank, beat.step, beat.doing, since, time.time(), self._host, self._pid)

    def _report(self, beat: Beat, others: dict[int, Heartbeat | None]) -> None:
        """Says what is wrong, and writes it with all Python stacks into the run's folder."""
        sentence = f"gptmill: {describe_hang(self._make_heartbeat(beat), others)}\n"
        # Not through sys.stderr, which a live display may have replaced and the thread that hangs may hold.
        with suppress(OSError):
            os.write(2, sentence.encode(errors="replace"))
        path = self._folder / f"hang_step_{beat.step:06d}_rank_{self._rank:05d}.txt"
        if not _call_within(STORAGE_SECONDS, lambda: _write_stacks(path, sentence)):
            with suppress(OSError):
                faulthandler.dump_traceback(file=2, all_threads=True)

    def _open_last_resort(self) -> IO[str] | None:
        """A file for the stacks of a process in which no Python thread can run, which only C code can still write.

        faulthandler's own thread is that C code. Its clock runs on while the process is stopped, so that it cannot
        tell a hang from sleep, and ends nothing; where a terminal can stop the process (Ctrl-Z) it is not even set.
        """
        if math.isinf(self._watchdog.limit_seconds) or sys.platform != "linux" or _has_terminal():
            return None
        with suppress(OSError):
            path = _make_path(self._folder, self._rank, "stacks.txt")
            path.parent.mkdir(exist_ok=True)
            return path.open("a", encoding="utf-8")
        return None

    def _set_last_resort(self, seconds: float) -> None:
        """Writes the stacks unless it is set anew within that time.

        C code that never gives the GIL back, such as a driver that does not answer, stops this thread as well.
        """
        with self._setting:
            if self._last_resort is not None and not self._closed.is_set():
                faulthandler.dump_traceback_later(seconds, exit=False, file=self._last_resort)


def describe_hang(own: Heartbeat, others: dict[int, Heartbeat | None]) -> str:
    """Which rank stands still, in what, and which rank it waits for."""
    what = f"rank {own.rank} has made no progress for {own.since:.0f} s: after step {own.step} it has been {own.doing}"
    silent = {rank: other for rank, other in others.items() if other is None or _is_silent(other, own.time)}
    if silent:
        return f"{what}; it waits for {_join([_describe_silent(*item, own.time) for item in silent.items()])}"
    ranks = [own, *(other for other in others.values() if other is not None)]
    last_step = min(rank.step for rank in ranks)
    longest = max(rank.since for rank in ranks if rank.step == last_step)
    # Ranks go in step: all wait for those that have come least far. Heartbeats are as old as the pause between them.
    behind = [rank for rank in ranks if rank.step == last_step and rank.since >= longest - 2 * POLL_SECONDS]
    if len(ranks) == 1:
        return what
    if len(behind) == len(ranks):
        return f"{what}; so have all {len(ranks)} ranks: what they exchange does not arrive"
    if own in behind:
        return f"{what}; the other ranks wait for it"
    culprits = [
        f"rank {rank.rank}, {rank.doing} after step {rank.step} for {rank.since + rank.measure_silence(own.time):.0f} s"
        for rank in behind
    ]
    return f"{what}; it waits for {_join(culprits)}"


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Replaces the rank's file, so that a reader never finds a piece."""
    path = _make_path(folder, heartbeat.rank, "json")
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    partial.replace(path)


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """The rank's last heartbeat; None where there is none, or nothing that makes sense."""
    try:
        heartbeat = Heartbeat(**json.loads(_make_path(folder, rank, "json").read_text(encoding="utf-8")))
        return replace(heartbeat, rank=rank, since=float(heartbeat.since), time=float(heartbeat.time))
    except (OSError, ValueError, TypeError):
        return None


def _make_path(folder: Path, rank: int, ending: str) -> Path:
    return folder / "heartbeat" / f"rank_{rank:05d}.{ending}"


def _gets_on(other: Heartbeat | None, limit: float) -> bool:
    return other is not None and other.since + other.measure_silence(time.time()) <= limit


def _is_silent(other: Heartbeat, now: float) -> bool:
    return other.measure_silence(now) > SILENT_SECONDS


def _describe_silent(rank: int, last: Heartbeat | None, now: float) -> str:
    if last is None:
        return f"rank {rank}, which has given no heartbeat at all"
    silence = f"no heartbeat for {last.measure_silence(now):.0f} s"
    process = f"its process {last.pid} on {last.host} may be dead"
    return f"rank {rank} ({silence}, {process}), last seen {last.doing} after step {last.step}"


def _join(texts: list[str]) -> str:
    named = "; ".join(texts[:MAX_NAMED_RANKS])
    return f"{named}; and {len(texts) - MAX_NAMED_RANKS} more" if len(texts) > MAX_NAMED_RANKS else named


def _write_stacks(path: Path, sentence: str) -> bool:
    """Whether the file could be written."""
    with suppress(OSError), path.open("w", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        return True
    return False


def _has_terminal() -> bool:
    """Whether a terminal's keys can stop this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _call_within(seconds: float, action: Callable[[], T]) -> T | None:
    """What it returns; None if it does not return in time, as from storage that does not answer."""
    results: list[T] = []
    thread = Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
