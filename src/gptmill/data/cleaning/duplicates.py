"""The deduplication index, kept in SQLite, so that memory does not grow with the corpus."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning.signatures import Keys, describe_minhash

MAX_PENDING_KEYS = 1 << 18  # inserted as one sorted batch, which touches every page of the table once
SETTINGS = ("cache_size = -262144", "locking_mode = EXCLUSIVE", "synchronous = FULL")  # the cache in KiB
SCHEMA = """
CREATE TABLE seen (key INTEGER PRIMARY KEY, position INTEGER NOT NULL);
CREATE TABLE about (keys TEXT NOT NULL);
"""


class DuplicateIndex:
    """The keys of all documents kept so far, each with the position at which it was first seen."""

    def __init__(self, path: Path, options: CleaningOptions, resumed_at: int) -> None:
        """Opens the index in its state before position `resumed_at`; 0 replaces any earlier file."""
        self._path = path
        self._exact, self._near = options.drop_duplicates, options.drop_near_duplicates
        self._pending: dict[int, int] = {}
        keys = describe_minhash() if options.drop_near_duplicates else "text"
        if resumed_at == 0:
            _delete(path)
        elif not path.exists():
            raise UserError(f"{path} is missing, so duplicates cannot be detected; {self._advise()}")
        with self._explain_errors():
            # isolation_level=None turns off Python's implicit transactions; only commit() may commit.
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            try:
                self._begin(keys, resumed_at)
            except BaseException:
                self._database.close()
                raise

    def find_duplicate(self, keys: Keys, position: int) -> str | None:
        """Returns the option that drops the document; for a new one, returns None and adds its keys."""
        if not len(keys):
            return None
        signed = keys.view(np.int64).tolist()  # SQLite has no unsigned integers
        if self._exact and self._is_known(signed[:1]):
            return "drop_duplicates"
        if self._near and self._is_known(signed):
            return "drop_near_duplicates"
        self._pending.update(dict.fromkeys(signed, position))
        if len(self._pending) >= MAX_PENDING_KEYS:
            with self._explain_errors():
                self._write_pending()
        return None

    def commit(self) -> None:
        """Commits all keys durably: they survive a kill or a power cut."""
        with self._explain_errors():
            self._write_pending()
            self._database.execute("COMMIT")
            self._database.execute("BEGIN EXCLUSIVE")

    def close(self) -> None:
        """Closes the index; keys that were not committed are lost."""
        self._database.close()

    def _advise(self) -> str:
        return f"remove the folder {self._path.parent} and run the same command again"

    def _is_known(self, keys: list[int]) -> bool:
        if not self._pending.keys().isdisjoint(keys):
            return True
        marks = ",".join("?" * len(keys))
        with self._explain_errors():
            rows = self._database.execute(f"SELECT 1 FROM seen WHERE key IN ({marks}) LIMIT 1", keys)
            return rows.fetchone() is not None

    def _write_pending(self) -> None:
        self._database.executemany("INSERT INTO seen VALUES (?, ?)", sorted(self._pending.items()))
        self._pending.clear()

    def _begin(self, keys: str, resumed_at: int) -> None:
        for setting in SETTINGS:
            self._database.execute(f"PRAGMA {setting}")
        if resumed_at == 0:
            self._database.executescript(SCHEMA)
            self._database.execute("INSERT INTO about VALUES (?)", (keys,))
        ((stored,),) = self._database.execute("SELECT keys FROM about").fetchall()
        if stored != keys:
            raise UserError(f"{self._path} was created with other keys ({stored}, now {keys}); {self._advise()}")
        self._database.execute("BEGIN EXCLUSIVE")
        self._database.execute("DELETE FROM seen WHERE position >= ?", (resumed_at,))

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            advice = f"free disk space if the disk is full, else {self._advise()}"
            raise UserError(f"the deduplication index {self._path} cannot be used: {error}; {advice}") from None


def _delete(path: Path) -> None:
    for name in (path.name, path.name + "-journal"):
        with suppress(FileNotFoundError):
            path.with_name(name).unlink()
