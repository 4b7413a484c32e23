"""The ranks that torchrun has started: joins them through a store, before there is a device or a process group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.runtime.rank_store import Failure, RankFailedError, RankStore, connect
from gptmill.runtime.rank_watch import RankBeat, RankWatch, open_rank_watch
from gptmill.runtime.watchdog import SILENT_SECONDS, Heartbeat

MAX_REASON = 500


@dataclass(frozen=True)
class Ranks:
    """How this rank and the others keep in touch."""

    store: RankStore
    watch: RankWatch

    def read_heartbeats(self, silent_seconds: float) -> dict[int, Heartbeat | None]:
        """What the other ranks do, by the clock of this one: who does not beat for that long is silent."""
        silent = {rank for rank, _ in self.watch.find_silent(silent_seconds)}
        beats, now = self.watch.read_beats(), time.time()
        return {rank: _make_heartbeat(rank, beat, now, rank in silent) for rank, beat in beats.items()}

    def announce_hang(self, sentence: str) -> bool:
        """Ends the others with this sentence; returns whether this rank is the one to print it."""
        hang = Failure(self.store.rank, sentence, exit_codes.HUNG)
        return self.store.publish(hang, is_own=False) == hang and self.store.takes_report()


def _make_heartbeat(rank: int, beat: RankBeat | None, now: float, is_silent: bool) -> Heartbeat | None:
    if beat is None:
        return None
    beaten_at = now - 2 * SILENT_SECONDS if is_silent else now
    return Heartbeat(rank, beat.step, beat.doing, beat.since, beaten_at, beat.host, beat.pid)


_joined: list[Ranks] = []
_num_joins = 0


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
    global _num_joins
    if not has_ranks():
        yield None
        return
    if _joined:
        yield _joined[-1]
        return
    rank, size, _, port = (read_variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    _num_joins += 1
    store = connect(rank, size, os.environ.get("MASTER_ADDR", "127.0.0.1"), port, _num_joins)
    with open_rank_watch(store) as watch:
        store.find_lost = watch.find_lost
        _joined.append(Ranks(store, watch))
        try:
            yield _joined[-1]
        except BaseException as error:
            if not isinstance(error, RankFailedError):
                store.publish(describe_failure(rank, error))
            raise
        finally:
            _joined.pop()
            store.leave()


def describe_failure(rank: int, error: BaseException, where: str = "") -> Failure:
    """What the other ranks say of an error that ends this one."""
    if isinstance(error, UserError):
        return Failure(rank, str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, f"rank {rank} was interrupted", exit_codes.INTERRUPTED)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
    return Failure(rank, f"rank {rank} failed{where}: {reason}", exit_codes.RANK_LOST)
