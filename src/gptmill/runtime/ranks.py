"""The ranks that torchrun has started: joins them through a store, before there is a device or a process group."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.runtime.flight_recorder import dump_flight_recorder
from gptmill.runtime.heartbeats import SILENT_SECONDS, Heartbeat
from gptmill.runtime.rank_meeting import connect
from gptmill.runtime.rank_store import LEAVING, Failure, RankFailedError, RankStore
from gptmill.runtime.rank_watch import RankBeat, RankWatch, describe_lost, open_rank_watch

SEARCH_SECONDS = 4.0  # several heartbeats: who misses them all is lost
MAX_REASON = 500
COLLECTIVE_ERROR = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|by peer", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """How this rank and the others keep in touch."""

    store: RankStore
    watch: RankWatch

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """What is raised inside ends the other ranks too. An exchange that fails is explained by who has failed."""
        try:
            yield
        except RankFailedError:
            raise
        except BaseException as error:
            is_collective = isinstance(error, Exception) and is_collective_error(error)
            if is_collective and (failure := self.find_failed(SEARCH_SECONDS)) is not None:
                raise RankFailedError(failure) from error
            self.store.publish(describe_failure(self.store.rank, error))
            raise

    def find_failed(self, seconds: float) -> Failure | None:
        """What another rank has failed with, or who is lost: who neither beats for so long nor has left in good order.

        Call it when a collective has failed.
        """
        silent = self.watch.find_silent(seconds)
        if (failure := self.store.find_failure()) is not None:
            self.store.has_noticed_failure = True
            return failure
        left = self.store.read_texts(LEAVING, [rank for rank, _ in silent])
        lost = [(rank, beat) for rank, beat in silent if rank not in left]
        return self.store.publish(describe_lost_ranks(lost, seconds)) if lost else None

    def read_heartbeats(self, silent_seconds: float) -> dict[int, Heartbeat | None]:
        """What the other ranks do, by the clock of this one: who does not beat for that long is silent."""
        silent = {rank for rank, _ in self.watch.find_silent(silent_seconds)}
        beats, now = self.watch.read_beats(), time.time()
        return {rank: _make_heartbeat(rank, beat, now, rank in silent) for rank, beat in beats.items()}

    def is_ending(self) -> bool:
        """Whether a rank has failed, and the watch is about to end this process for it."""
        return self.store.find_failure() is not None and not self.store.has_noticed_failure

    def announce_hang(self, sentence: str) -> bool:
        """Ends the others with this sentence; returns whether this rank is the one to print it."""
        hang = Failure(self.store.rank, sentence, exit_codes.HUNG)
        is_first = self.store.publish(hang, is_own=False) == hang
        dump_flight_recorder(self.store.rank)
        return is_first and self.store.takes_report()


def _make_heartbeat(rank: int, beat: RankBeat | None, now: float, is_silent: bool) -> Heartbeat | None:
    if beat is None:
        return None
    beaten_at = now - 2 * SILENT_SECONDS if is_silent else now
    return Heartbeat(rank, beat.step, beat.doing, beat.since, beaten_at, beat.host, beat.pid)


_joined: list[Ranks] = []


def has_ranks() -> bool:
    """Whether torchrun, or something that sets its variables, has started this process."""
    return "RANK" in os.environ


def read_world_size() -> int:
    """The number of ranks that torchrun started; 1 without torchrun."""
    return read_variable("WORLD_SIZE") if has_ranks() else 1


def read_variable(name: str) -> int:
    """A variable of torchrun; raises UserError where RANK is left over or was set by hand, without the others."""
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise UserError(
            f"RANK is set in the environment, as torchrun does it, but {name} is {value or 'not set'}; "
            f"start several processes with torchrun, or one without RANK: unset RANK"
        )
    return int(value)


@contextmanager
def join_ranks() -> Iterator[Ranks | None]:
    """All ranks, once each of them has come here; None without torchrun. Inside, it gives the same ones again.

    What is raised inside ends the other ranks too: an error of the user with the same sentence and exit code.
    """
    if not has_ranks():
        yield None
        return
    if _joined:
        yield _joined[-1]
        return
    rank, size, *_ = (read_variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    store = connect(rank, size)
    with open_rank_watch(store) as watch:
        store.find_lost = watch.find_lost
        ranks = Ranks(store, watch)
        _joined.append(ranks)
        try:
            with ranks.share_errors():
                yield ranks
        finally:
            _joined.pop()
            store.leave()


def is_collective_error(error: Exception) -> bool:
    """Whether an exchange between ranks has failed. Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and COLLECTIVE_ERROR.search(str(error)) is not None
    )


def describe_lost_ranks(lost: list[tuple[int, RankBeat]], silence: float) -> Failure:
    """Names the first of them, and how many others there are."""
    more = f"; {len(lost) - 1} more ranks are lost too" if len(lost) > 1 else ""
    return Failure(lost[0][0], f"{describe_lost(*lost[0], silence)}{more}", exit_codes.RANK_LOST, is_lost=True)


def describe_failure(rank: int, error: BaseException, where: str = "") -> Failure:
    """What the other ranks say of an error that ends this one."""
    if isinstance(error, UserError):
        return Failure(rank, str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, f"rank {rank} was interrupted", exit_codes.INTERRUPTED)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
    return Failure(rank, f"rank {rank} failed{where}: {reason}", exit_codes.RANK_LOST)
