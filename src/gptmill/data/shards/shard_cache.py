"""A bounded folder of fetched shards, shared by the processes of a machine. A file under its own name is whole.

What is in the making has the suffix .partial, and whoever makes it holds a lock that ends with its process: so a
partial file without a holder is left over from a kill.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.files import flush_to_disk, hash_file
from gptmill.data.shards.arrays import HEADER_BYTES, MapPool, find_array
from gptmill.data.shards.remote_folder import RemoteFolder

try:
    import fcntl
except ImportError:  # Windows has no flock; there a cache is for one process
    fcntl = None  # type: ignore[assignment]

SHARD, PARTIAL, LOCK = ".npy", ".partial", ".lock"
ROOM_LOCK = "room.lock"  # of who counts, evicts or adds
ROOM_POLL_SECONDS = 0.05


class RemoteFile(NamedTuple):
    """An array in a remote folder."""

    name: str
    sha256: str
    dtype: np.dtype[Any]
    length: int

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + self.length * self.dtype.itemsize

    @property
    def local_name(self) -> str:
        """Named by its content too, so that a corpus that was replaced is not mixed with the former one."""
        return f"{self.name.removesuffix(SHARD).replace('/', '-')}-{self.sha256[:16]}{SHARD}"


class ShardCache:
    """Remote files as local arrays: fetched when opened, or ahead of it in the background."""

    def __init__(self, remote: RemoteFolder, folder: Path, max_bytes: int, files: Sequence[RemoteFile]) -> None:
        self.uri = remote.uri
        self.holds_all = sum(file.size_bytes for file in files) <= max_bytes
        self._remote = remote
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes = {Path(file.local_name).stem: file.size_bytes for file in files}
        self._pool = MapPool()
        self._lock = threading.Lock()
        self._current: dict[object, RemoteFile] = {}
        self._wanted: list[RemoteFile] = []
        self._changes = 0
        self._reader: threading.Thread | None = None
        with self._hold_room():
            self._make_room(0, kept=set())

    def open(self, file: RemoteFile, owner: object) -> NDArray[Any]:
        """The array; `owner` reads one at a time, and the one that it reads is not taken from under it."""
        path = self._folder / file.local_name
        if self.holds_all and (array := self._pool.find(str(path))) is not None:
            return array  # nothing comes and goes, so that nothing has to be kept account of
        if self._current.get(owner) != file:
            with self._lock:
                self._current[owner] = file
                self._wanted = [wanted for wanted in self._wanted if wanted != file]
                self._wake_reader()
            self._pool.drop_vanished()
            with suppress(OSError):
                os.utime(path)
        while (array := self._pool.find(str(path))) is None:
            self._fetch(file, is_ahead=False)
            with suppress(FileNotFoundError):  # another process needed the room in this moment
                self._map(file, path)
        return array

    def _map(self, file: RemoteFile, path: Path) -> None:
        try:
            stored = find_array(path)
            found = f"{stored.dtype} ({stored.length},)"
        except ValueError as error:
            if hash_file(path) != file.sha256:  # it was sound when it came
                self._evict(path)
                return
            stored, found = None, str(error)
        if stored is None or (stored.dtype, stored.length) != (file.dtype, file.length):
            raise UserError(
                f"{self.uri}/{file.name} holds {found}, its manifest says {file.dtype} ({file.length},); "
                f"upload the corpus again"
            )
        self._pool.open(stored)

    def fetch_ahead(self, files: Sequence[RemoteFile]) -> None:
        """Fetches these in the background, soonest needed first, as far as there is room."""
        with self._lock:
            self._wanted = list(files)
            self._wake_reader()

    def _wake_reader(self) -> None:
        self._changes += 1
        if self._wanted and self._reader is None:
            self._reader = threading.Thread(target=self._read_ahead, name="gptmill-read-ahead", daemon=True)
            self._reader.start()

    def _read_ahead(self) -> None:
        """Ends when all is here, or nothing more fits until something changes."""
        while True:
            with self._lock:
                changes = self._changes
                file = next((file for file in self._wanted if not (self._folder / file.local_name).exists()), None)
            try:
                goes_on = file is not None and self._fetch(file, is_ahead=True)
            except (UserError, OSError):  # whoever needs the file meets the same error, and tells it
                goes_on = False
            with self._lock:
                if not goes_on and changes == self._changes:
                    self._reader = None
                    return

    def _fetch(self, file: RemoteFile, *, is_ahead: bool) -> bool:
        """Makes sure that the file is here; False where it is only wanted ahead and there is no room."""
        path = self._folder / file.local_name
        partial = path.with_suffix(PARTIAL)
        with hold_lock(path.with_suffix(LOCK)):
            if path.exists():
                return True
            while not self._reserve(file, partial, is_ahead=is_ahead):
                if is_ahead:
                    return False
                time.sleep(ROOM_POLL_SECONDS)  # until a download that takes the room ends, and can be evicted
            try:
                self._remote.download(file.name, partial, file.sha256)
                flush_to_disk(partial)
                with self._hold_room():  # who counts must not miss it under both names
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        return True

    def _reserve(self, file: RemoteFile, partial: Path, *, is_ahead: bool) -> bool:
        """Takes room for a file, where need be from others: ahead of its use not from those needed sooner."""
        with self._hold_room(), self._lock:
            wanted = [each.local_name for each in self._wanted]
            sooner = wanted[: wanted.index(file.local_name)] if file.local_name in wanted else []
            in_use = {each.local_name for each in self._current.values()}
            if not self._make_room(file.size_bytes, kept=in_use | set(sooner) if is_ahead else set()):
                return False
            partial.touch()
            return True

    def _make_room(self, size_bytes: int, kept: set[str]) -> bool:
        """Evicts what nobody wants first, and of that the least recently used; or nothing, where it would not do."""
        sizes = self._list_sizes()
        wanted = {each.local_name for each in self._wanted}
        in_use = {each.local_name for each in self._current.values()}
        ages = [(name in in_use, name in wanted, age, name) for name, (_, age) in sizes.items() if name not in kept]
        free = self._max_bytes - sum(size for size, _ in sizes.values())
        evicted = []
        for *_, name in sorted(ages):
            if free < size_bytes and name.endswith(SHARD):
                evicted.append(name)
                free += sizes[name][0]
        if free < size_bytes:
            return False
        for name in evicted:
            self._evict(self._folder / name)
        return True

    def _evict(self, path: Path) -> None:
        """Who has the file mapped, in this process or another, keeps its bytes until they let go."""
        self._pool.drop(str(path))
        with suppress(OSError):  # gone already, or on Windows still in use
            path.unlink()

    def _list_sizes(self) -> dict[str, tuple[int, float]]:
        """Size and last use of every file, counting one in the making as whole; removes what killed processes left."""
        sizes: dict[str, tuple[int, float]] = {}
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == SHARD:
                    sizes[path.name] = status.st_size, status.st_mtime
                elif path.suffix == PARTIAL:
                    with hold_lock(path.with_suffix(LOCK), wait=False) as is_left_over:
                        if is_left_over:
                            path.unlink(missing_ok=True)
                        else:
                            sizes[path.name] = self._sizes.get(path.stem, status.st_size), status.st_mtime
        return sizes

    def _hold_room(self) -> AbstractContextManager[bool]:
        return hold_lock(self._folder / ROOM_LOCK)


@contextmanager
def hold_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds a lock between threads and processes alike; yields False where it is taken and not to be waited for."""
    while fcntl is not None:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks
                break
            if not _is_same(path, file.fileno()):
                continue  # the former holder removed it; what we locked is nobody's lock any more
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return
    yield True


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
