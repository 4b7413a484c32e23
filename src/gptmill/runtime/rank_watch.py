"""A thread of each rank that beats into the ranks' store, and ends a process that is blocked while another has failed.

Every rank watches rank 0, and rank 0 all others: one that no longer beats is named, and all ranks end with that
sentence. Silence is measured on the watcher's own clock, since those of other machines may differ. A second thread
notices when the store itself no longer answers: requests to a machine that is cut off never return.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gptmill.config import exit_codes
from gptmill.config.json_text import parse_json
from gptmill.runtime.rank_store import LEAVING, Failure, RankStore

POLL_SECONDS = 1.0
SILENT_SECONDS = 60.0  # a rank beats every second; one whose threads do not run for a minute is lost
GRACE_SECONDS = 3.0  # in which the main thread may notice a failure by itself, and end in good order
SUSPENDED_SECONDS = 5.0  # between two polls: this process did not run itself


@dataclass(frozen=True)
class RankBeat:
    """What a rank is doing."""

    step: int = 0
    doing: str = "starting"
    since: float = 0.0
    """For how many seconds."""
    busy_seconds: float = 0.0
    """How long its own part of a step takes, without waiting for others; 0 if unknown."""
    host: str = ""
    pid: int = 0
    machine: str = ""
    """Equal for processes that see each other; empty if that is unknown."""
    number: int = 0
    """Counts the beats."""


def ignore_failure(_failure: Failure) -> None:
    """What a rank does with a failure before it has a run to record it in."""


class RankWatch:
    """Beats for this rank and knows the beats of others."""

    def __init__(self, ranks: RankStore, exit_process: Callable[[int], None] = os._exit) -> None:
        self.make_beat: Callable[[], RankBeat] = RankBeat
        """Describes what the main thread is doing."""
        self.record: Callable[[Failure], None] = ignore_failure
        """Called before a blocked process is ended."""
        self.silent_seconds = SILENT_SECONDS
        self._ranks, self._exit_process = ranks, exit_process
        self._machine = identify_machine()
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "machine": self._machine}
        self._watched = [rank for rank in range(ranks.size) if rank != ranks.rank and 0 in (rank, ranks.rank)]
        self._seen: dict[int, tuple[RankBeat, float]] = {}
        self._beats = 0
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        tasks = (self._run, self._guard)
        self._threads = [threading.Thread(target=task, daemon=True, name="rank-watch") for task in tasks]

    def start(self) -> None:
        self._beat()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(POLL_SECONDS)

    def read_beats(self) -> dict[int, RankBeat | None]:
        """What each other rank last said; None if it never said anything."""
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        found = self._parse(others)
        return {rank: found.get(rank) for rank in others}

    @property
    def watched_beats(self) -> dict[int, RankBeat]:
        """The newest beats of the ranks that this one watches."""
        return {rank: beat for rank, (beat, _) in self._seen.items()}

    def find_lost(self) -> Failure | None:
        """Names a watched rank that has been silent for too long, or whose process on this machine has ended."""
        now = time.monotonic()
        for rank, (beat, heard_at) in list(self._seen.items()):
            has_ended = bool(self._machine) and beat.machine == self._machine and not is_running(beat.pid)
            is_lost = has_ended or now - heard_at > self.silent_seconds
            if is_lost and not self._ranks.read_texts(LEAVING, [rank]):
                text = describe_lost(rank, beat, None if has_ended else now - heard_at)
                return Failure(rank, text, exit_codes.RANK_LOST, is_lost=True)
        return None

    def find_silent(self, seconds: float) -> list[tuple[int, RankBeat]]:
        """Waits that long, or until a rank has failed; the ranks that did not beat meanwhile."""
        before = self.read_beats()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._ranks.find_failure() is None:
            time.sleep(POLL_SECONDS / 10)
        after = self.read_beats()
        return [(rank, beat) for rank, beat in after.items() if beat is not None and beat == before[rank]]

    def _run(self) -> None:
        polled_at = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now = time.monotonic()
            if now - polled_at > SUSPENDED_SECONDS:  # others may have been suspended with this process
                self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
            polled_at = now
            self._beat()
            self._listen(now)
            failure = self._ranks.find_failure()
            if failure is None and (lost := self.find_lost()) is not None:
                failure = self._ranks.publish(lost, is_own=False)
            self._answered_at = time.monotonic()
            if failure is not None:
                self._answered_at = math.inf
                self._end(failure)
                return

    def _guard(self) -> None:
        polled_at = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now = time.monotonic()
            if now - polled_at > SUSPENDED_SECONDS:
                self._answered_at = max(now, self._answered_at)
            polled_at = now
            if now - self._answered_at > self.silent_seconds:
                self._end_cut_off(now)
                return

    def _end_cut_off(self, now: float) -> None:
        """Ends this process without a word to the others: the store is on the machine of rank 0, which is gone."""
        failure = self._ranks.describe_lost_store()
        if 0 in self._seen:
            beat, heard_at = self._seen[0]
            failure = Failure(0, describe_lost(0, beat, now - heard_at), exit_codes.RANK_LOST, is_lost=True)
        with suppress(Exception):
            self.record(failure)
        with suppress(OSError):
            os.write(2, f"{failure}\n".encode(errors="replace"))
        self._exit_process(failure.exit_code)

    def _beat(self) -> None:
        self._beats += 1
        beat = {**asdict(self.make_beat()), **self._identity, "number": self._beats}
        self._ranks.set_text("beat", json.dumps(beat))

    def _listen(self, now: float) -> None:
        for rank, beat in self._parse(self._watched).items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now

    def _parse(self, ranks: list[int]) -> dict[int, RankBeat]:
        beats = {}
        for rank, text in self._ranks.read_texts("beat", ranks).items():
            with suppress(ValueError, TypeError):
                beats[rank] = RankBeat(**parse_json(text))
        return beats

    def _end(self, failure: Failure) -> None:
        """Ends this process if its main thread does not: it may be blocked in a collective for hours."""
        self._closed.wait(GRACE_SECONDS)
        if self._closed.is_set() or self._ranks.has_noticed_failure:
            return
        with suppress(Exception):
            self.record(failure)
        if self._ranks.takes_report():
            # Not through sys.stderr, which the blocked thread may have locked.
            with suppress(OSError):
                os.write(2, f"{failure}\n".encode(errors="replace"))
        self._ranks.leave()
        self._exit_process(failure.exit_code)


def describe_lost(rank: int, beat: RankBeat, silence: float | None) -> str:
    """The silence is None for a process that has ended."""
    what = "has ended without a word" if silence is None else f"has not been heard of for {silence:.0f} s"
    return (
        f"rank {rank} is lost: its process {beat.pid} on {beat.host} {what}; "
        f"it was last seen {beat.doing} after step {beat.step:,}"
    )


def identify_machine() -> str:
    """The same for processes that can look at each other: of one kernel, and in one container."""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def open_rank_watch(ranks: RankStore) -> Iterator[RankWatch]:
    """Watches until the context is left."""
    watch = RankWatch(ranks)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()
