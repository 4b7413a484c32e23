"""What ranks tell each other before and beside their collectives: through the key-value store of the process group.

It needs no device and no process group, a wait for a rank that has failed or is lost ends at once with a sentence, and
a background thread can use it while the main thread is blocked in a collective. Knows nothing of training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json

REPORT_SECONDS = 3.0  # how long a rank waits for rank 0 to print what has happened
LEAVE_SECONDS = 10.0  # for the others to read what has failed
FINISH_SECONDS = 600.0  # for the others to finish
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.001, 0.05
FAILURE = "failure"
LEAVING = "leaving"
"""The texts of ranks that end in good order: their silence is no loss."""

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Why a rank ends, or that it is lost: what the other ranks end with as well."""

    rank: int
    text: str
    exit_code: int = exit_codes.USER_ERROR
    is_lost: bool = False
    """Whether others found out, since the rank itself no longer speaks."""

    def __str__(self) -> str:
        """The line to print. What a user did wrong does not say on which rank."""
        where = f" (rank {self.rank})" if self.rank and self.exit_code == exit_codes.USER_ERROR else ""
        return f"gptmill{where}: {self.text}"


class RankFailedError(UserError):
    """Raised where another rank has failed or is lost; the message is that rank's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.exit_code = failure.exit_code


class RankStore:
    """The values that ranks share, as JSON: nothing that another machine sends is unpickled."""

    def __init__(self, store: Store, rank: int, size: int, address: str = "") -> None:
        self.rank, self.size = rank, size
        self.has_noticed_failure = False
        """Whether the main thread knows that a rank has failed, and ends by itself."""
        self.find_lost: Callable[[], Failure | None] = lambda: None
        """Finds a rank that has gone silent."""
        self._store, self._address = store, address
        self._num_exchanges = 0

    def share(self, what: str, make: Callable[[], T]) -> T:
        """The value that rank 0 makes, on every rank; what goes wrong there is raised on every rank."""
        key = self._make_key(what)
        if self.rank == 0:
            with self.publish_failure():
                value = make()
            self._set(key, value)
            return value
        shared: T = self._await(key, f"{what} of rank 0")
        return shared

    def gather(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        key = self._make_key(what)
        self._set(f"{key}/{self.rank}", value)
        if self.rank == 0:
            values = [self._await(f"{key}/{rank}", f"{what} of rank {rank}") for rank in range(self.size)]
            self._set(key, values)
        gathered: list[Any] = self._await(key, f"{what} of all ranks")
        return gathered

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Ends on all ranks at once; if one of them raises a UserError inside, they all do."""
        with self.publish_failure():
            yield
        self.gather(what, None)

    @contextmanager
    def publish_failure(self) -> Iterator[None]:
        """Tells the other ranks of a UserError that is raised inside."""
        try:
            yield
        except RankFailedError:
            raise
        except UserError as error:
            self.publish(Failure(self.rank, str(error), error.exit_code))
            raise

    def publish(self, failure: Failure, *, is_own: bool = True) -> Failure:
        """Tells all ranks why this one ends, or that another one is lost; returns the first failure published."""
        self.has_noticed_failure = self.has_noticed_failure or is_own
        try:
            first = self._store.compare_set(FAILURE, "", json.dumps(asdict(failure)))
            return Failure(**parse_json(first))
        except RuntimeError:  # the store ended with its host
            return failure

    def find_failure(self) -> Failure | None:
        """The first failure of a rank; a store that no longer answers is one."""
        try:
            if not self._store.check([FAILURE]):
                return None
            return Failure(**parse_json(self._store.get(FAILURE)))
        except RuntimeError:
            return self.describe_lost_store()

    def describe_lost_store(self) -> Failure:
        if is_agents_store():
            text = f"torchrun at {self._address} no longer answers; see its own messages"
        else:
            text = f"rank 0 is lost: its store at {self._address} no longer answers"
        return Failure(0, text, exit_codes.RANK_LOST, is_lost=True)

    def raise_failure(self) -> None:
        """Raises what another rank has failed with, if one has, or that it is lost."""
        failure = self.find_failure()
        if failure is None and (lost := self.find_lost()) is not None:
            failure = self.publish(lost, is_own=False)
        if failure is not None:
            self.has_noticed_failure = True
            raise RankFailedError(failure)

    def takes_report(self) -> bool:
        """Whether this rank prints what has failed: rank 0 does, or the first other one if that does not in time."""
        try:
            deadline = time.monotonic() + (0.0 if self.rank == 0 else REPORT_SECONDS)
            while not self._store.check(["reporter"]) and time.monotonic() < deadline:
                time.sleep(LONGEST_POLL_SECONDS)
            return bool(self._store.compare_set("reporter", "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:
            return True

    def leave(self) -> None:
        """Says that this rank no longer needs the store. Rank 0 may hold it, and so waits for the others."""
        self.set_text(LEAVING, "")
        try:
            self._store.add("left", 1)
            failure = self.find_failure()
            deadline = time.monotonic() + (FINISH_SECONDS if failure is None else LEAVE_SECONDS)
            waits = self.rank == 0 or failure is not None  # torchrun would kill the ones that still unwind
            expected = self.size - (failure is not None and failure.is_lost)
            while waits and self._store.add("left", 0) < expected and time.monotonic() < deadline:
                time.sleep(LONGEST_POLL_SECONDS)
        except RuntimeError:
            return

    def set_text(self, key: str, text: str) -> None:
        """Publishes a text of this rank; does nothing if the store is gone."""
        try:
            self._store.set(f"{key}/{self.rank}", text)
        except RuntimeError:
            return

    def has_texts(self, key: str, ranks: list[int]) -> bool:
        """Whether all of these ranks have published one: a single request."""
        return bool(self._store.check([f"{key}/{rank}" for rank in ranks]))

    def read_texts(self, key: str, ranks: list[int]) -> dict[int, str]:
        """The texts of those of these ranks that have published one; empty if the store is gone."""
        try:
            known = ranks if self.has_texts(key, ranks) else [rank for rank in ranks if self.has_texts(key, [rank])]
            texts = self._store.multi_get([f"{key}/{rank}" for rank in known]) if known else []
        except RuntimeError:
            return {}
        return {rank: bytes(text).decode(errors="replace") for rank, text in zip(known, texts, strict=True)}

    def open_store(self, prefix: str) -> Store:
        """A connection of its own for the process group, whose waits would hold up the other threads."""
        return PrefixStore(prefix, self._store.clone())  # type: ignore[attr-defined]

    def _make_key(self, what: str) -> str:
        """Ranks exchange the same things in the same order."""
        self._num_exchanges += 1
        return f"exchange/{self._num_exchanges}/{what}"

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError:
            self.has_noticed_failure = True
            raise RankFailedError(self.describe_lost_store()) from None

    def _await(self, key: str, what: str) -> Any:
        """Polls: a blocking wait would hold up the other threads, and could not end with a sentence."""
        pause = FIRST_POLL_SECONDS
        try:
            while not self._store.check([key]):
                self.raise_failure()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_SECONDS)
            return parse_json(self._store.get(key))
        except RuntimeError:
            self.has_noticed_failure = True
            failure = self.describe_lost_store()
            raise RankFailedError(Failure(0, f"waiting for the {what}: {failure.text}", failure.exit_code)) from None


def is_agents_store() -> bool:
    """Whether torchrun's agent holds the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
