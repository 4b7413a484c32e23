"""When a rank fails: it leaves a crash file and tells the others, and those name it and end.

A collective that fails is only the consequence of a lost rank; the error that is raised then names that rank.
"""

from __future__ import annotations

import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.data.batches.data_loader import DataLoaderStoppedError
from gptmill.runs.crash_files import has_crash, write_crash
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed
from gptmill.runs.history import append_event
from gptmill.runtime.compiling import is_compiler_error
from gptmill.runtime.rank_store import Failure, RankFailedError
from gptmill.runtime.rank_watch import RankBeat, describe_lost
from gptmill.runtime.ranks import Ranks, describe_failure
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.watchdog import Watchdog
from gptmill.runtime.world import World

SEARCH_SECONDS = 4.0  # several heartbeats: who misses them all is lost
MAX_STACKS = 60_000
COLLECTIVE_ERROR = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|by peer", re.IGNORECASE)


class RankFailures:
    """Finds out which rank has failed, and records it in the run's folder."""

    def __init__(self, run: RunDirectory, world: World, watchdog: Watchdog, stop: StopFlag) -> None:
        self._run, self._world, self._watchdog, self._stop = run, world, watchdog, stop
        self._started = time.time()
        self._settled: Exception | None = None

    def settle(self, error: Exception) -> Exception:
        """The error to end with: of the rank that has failed first. Crashes are recorded, and told to other ranks."""
        if self._settled is None:
            self._settled = self._find_cause(error)
        return self._settled

    def record_blocked(self, failure: Failure) -> None:
        """Records why this process is ended, by a thread, since its main thread is blocked."""
        rank, step = self._world.rank, self._watchdog.last_beat.step
        sentence = f"rank {rank} was {self._watchdog.last_beat.doing} when it was ended: {failure.text}"
        write_crash(self._run, rank, step, sentence, format_stacks())
        self._record_other(failure)
        if self._world.is_main:
            append_event(self._run, RunCrashed(step, failure.text))

    def _find_cause(self, error: Exception) -> Exception:
        ranks = self._world.ranks
        if isinstance(error, RankFailedError):
            self._record_other(error.failure)
            return error
        if isinstance(error, UserError):
            if ranks is not None:
                ranks.store.publish(describe_failure(self._world.rank, error))
            return error
        is_collective = ranks is not None and is_collective_error(error)
        if ranks is not None and is_collective and (failure := self._find_failure(ranks)) is not None:
            self._record_other(failure)
            found = RankFailedError(failure)
            found.__cause__ = error
            return found
        if not (self._stop and (is_collective or is_compiler_error(error))):
            self._record_own(error)
        return error

    def _find_failure(self, ranks: Ranks) -> Failure | None:
        """What another rank has failed with; or that one is lost, which has neither failed nor left in good order."""
        silent = ranks.watch.find_silent(SEARCH_SECONDS)
        if (failure := ranks.store.find_failure()) is not None:
            ranks.store.has_noticed_failure = True
            return failure
        left = ranks.store.read_texts("leaving", [rank for rank, _ in silent])
        lost = [(rank, beat) for rank, beat in silent if rank not in left]
        if not lost:
            return None
        return ranks.store.publish(describe_lost_ranks(lost, SEARCH_SECONDS))

    def _record_own(self, error: Exception) -> None:
        rank, beat = self._world.rank, self._watchdog.last_beat
        failure = describe_failure(rank, error, f" on {socket.gethostname()} after step {beat.step:,}, {beat.doing}")
        stacks = "".join(traceback.format_exception(error))
        write_crash(self._run, rank, beat.step, failure.text, stacks)
        if self._world.ranks is not None:
            self._world.ranks.store.set_text("crash", stacks[-MAX_STACKS:])
            self._world.ranks.store.publish(failure)

    def _record_other(self, failure: Failure) -> None:
        """Writes the crash of a rank that could not: it was killed, or does not see the run's folder."""
        ranks = self._world.ranks
        if not self._world.is_main or ranks is None or failure.rank == 0:
            return
        if not has_crash(self._run, failure.rank, self._started):
            stacks = ranks.store.read_texts("crash", [failure.rank]).get(failure.rank, "")
            write_crash(self._run, failure.rank, self._watchdog.last_beat.step, failure.text, stacks)


@contextmanager
def open_rank_failures(run: RunDirectory, world: World, watchdog: Watchdog, stop: StopFlag) -> Iterator[RankFailures]:
    """Records every error that is raised inside, and ends with the one that caused it."""
    failures = RankFailures(run, world, watchdog, stop)
    if world.ranks is not None:
        _connect(world.ranks, failures, watchdog)
    try:
        yield failures
    except DataLoaderStoppedError:
        raise
    except Exception as error:
        cause = failures.settle(error)
        if cause is error:
            raise
        raise cause from error
    finally:
        if world.ranks is not None:
            world.ranks.store.set_text("leaving", "")


def _connect(ranks: Ranks, failures: RankFailures, watchdog: Watchdog) -> None:
    ranks.watch.make_beat = make_beat_reader(watchdog)
    ranks.watch.record = failures.record_blocked
    ranks.watch.silent_seconds = min(ranks.watch.silent_seconds, watchdog.min_limit_seconds)


def make_beat_reader(watchdog: Watchdog) -> Callable[[], RankBeat]:
    """Describes what the main thread is doing, for the other ranks."""

    def make_beat() -> RankBeat:
        beat = watchdog.last_beat
        return RankBeat(beat.step, beat.doing, time.monotonic() - beat.seconds, watchdog.busy_seconds)

    return make_beat


def is_collective_error(error: Exception) -> bool:
    """Whether an exchange between ranks has failed. Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and COLLECTIVE_ERROR.search(str(error)) is not None
    )


def describe_lost_ranks(lost: list[tuple[int, RankBeat]], silence: float) -> Failure:
    """Names the first of them, and how many others there are."""
    more = f"; {len(lost) - 1} more ranks are lost too" if len(lost) > 1 else ""
    return Failure(lost[0][0], f"{describe_lost(*lost[0], silence)}{more}", exit_codes.RANK_LOST, is_lost=True)


def format_stacks() -> str:
    """The Python stacks of all threads."""
    stacks = (
        f"Thread {number}\n{''.join(traceback.format_stack(frame))}" for number, frame in sys._current_frames().items()
    )
    return "\n".join(stacks)
