"""When a rank fails: it leaves a crash file and tells the others, and those name it and end.

A collective that fails is only the consequence of a lost rank; the error that is raised then names that rank.
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gptmill.config.errors import UserError
from gptmill.data.batches.data_loader import DataLoaderStoppedError
from gptmill.runs.crash_files import has_crash, write_crash
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed
from gptmill.runs.history import append_event
from gptmill.runtime.compiling import is_compiler_error
from gptmill.runtime.flight_recorder import dump_flight_recorder
from gptmill.runtime.rank_store import LEAVING, Failure, RankFailedError
from gptmill.runtime.rank_watch import RankBeat
from gptmill.runtime.ranks import SEARCH_SECONDS, Ranks, describe_failure, is_collective_error
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.watchdog import Watchdog
from gptmill.runtime.world import World
from gptmill.training.stop_agreement import publish_stop, take_over_stop

MAX_STACKS = 60_000


class RankFailures:
    """Finds out which rank has failed, and records it in the run's folder."""

    def __init__(self, run: RunDirectory, world: World, watchdog: Watchdog, stop: StopFlag) -> None:
        self._run, self._world, self._watchdog, self._stop = run, world, watchdog, stop
        self._started = time.time()
        self._settled: Exception | None = None

    def settle(self, error: Exception) -> Exception:
        """The error to end with: the first one, of the rank that has failed first.

        Crashes are recorded, and told to other ranks.
        """
        if self._settled is None:
            cause = self._find_cause(error)
            if self._follows_stop(cause):
                return cause  # what is raised next, as by the last save, may be a failure
            self._settled = cause
        return self._settled

    def _follows_stop(self, error: Exception) -> bool:
        """Whether an error is only the consequence of a request to stop this rank or another one."""
        is_collective = self._world.ranks is not None and is_collective_error(error)
        is_caused = is_collective or is_compiler_error(error)
        return isinstance(error, DataLoaderStoppedError) or (bool(self._stop) and is_caused)

    def record_blocked(self, failure: Failure) -> None:
        """Records why this process is ended, by a thread, since its main thread is blocked."""
        rank, step = self._world.rank, self._watchdog.last_beat.step
        sentence = f"rank {rank} was {self._watchdog.last_beat.doing} when it was ended: {failure.text}"
        write_crash(self._run, rank, step, sentence, format_stacks())
        dump_flight_recorder(rank)
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
        if ranks is not None and is_collective_error(error):
            if (failure := ranks.find_failed(SEARCH_SECONDS)) is not None:
                self._record_other(failure)
                found = RankFailedError(failure)
                found.__cause__ = error
                return found
            take_over_stop(self._stop, ranks)  # of a rank that was stopped while it waited for data
        if not self._follows_stop(error):
            self._record_own(error)
        return error

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
    except Exception as error:
        cause = failures.settle(error)
        if cause is error:
            raise
        raise cause from error
    finally:
        if world.ranks is not None:
            publish_stop(stop, world.ranks)
            world.ranks.store.set_text(LEAVING, "")


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


def format_stacks() -> str:
    """The Python stacks of all threads."""
    stacks = (
        f"Thread {number}\n{''.join(traceback.format_stack(frame))}" for number, frame in sys._current_frames().items()
    )
    return "\n".join(stacks)
