"""A bounded cache of remote shards, shared by the processes of a machine.

A file under its final name is complete. A download has the suffix .partial, and its process holds a lock that ends
with the process: a partial file whose lock is free was left over by a killed process.
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
except ImportError:  # Windows has no flock: processes cannot share a cache there
    fcntl = None  # type: ignore[assignment]

SHARD, PARTIAL, LOCK = ".npy", ".partial", ".lock"
SPACE_LOCK = "room.lock"  # held while files are counted, evicted or added
SPACE_POLL_SECONDS = 0.05


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
        """The name in the cache. It contains the checksum, so that a replaced corpus does not mix with the old one."""
        return f"{self.name.removesuffix(SHARD).replace('/', '-')}-{self.sha256[:16]}{SHARD}"


class ShardCache:
    """Remote files as local arrays: fetched when opened, or prefetched in the background."""

    def __init__(self, remote: RemoteFolder, folder: Path, max_bytes: int, files: Sequence[RemoteFile]) -> None:
        self.uri = remote.uri
        self.can_hold_all = sum(file.size_bytes for file in files) <= max_bytes
        self._remote = remote
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes = {Path(file.local_name).stem: file.size_bytes for file in files}
        self._pool = MapPool()
        self._lock = threading.Lock()
        self._open_files: dict[object, RemoteFile] = {}
        self._upcoming: list[RemoteFile] = []
        self._generation = 0
        self._prefetch_thread: threading.Thread | None = None
        with self._lock_space():
            self._free_space(0, kept=set())

    def open(self, file: RemoteFile, owner: object) -> NDArray[Any]:
        """Returns the array. Each `owner` reads one file at a time; prefetching does not evict that file."""
        path = self._folder / file.local_name
        if self.can_hold_all and (array := self._pool.find(str(path))) is not None:
            return array  # nothing is ever evicted: no bookkeeping needed
        if self._open_files.get(owner) != file:
            with self._lock:
                self._open_files[owner] = file
                self._upcoming = [upcoming for upcoming in self._upcoming if upcoming != file]
                self._start_prefetch()
            self._pool.drop_deleted()
            with suppress(OSError):
                os.utime(path)
        while (array := self._pool.find(str(path))) is None:
            self._fetch(file, is_prefetch=False)
            with suppress(FileNotFoundError):  # another process evicted it just now
                self._map(file, path)
        return array

    def _map(self, file: RemoteFile, path: Path) -> None:
        try:
            stored = find_array(path)
            found = f"{stored.dtype} ({stored.length},)"
        except ValueError as error:
            if hash_file(path) != file.sha256:  # damaged after the download
                self._evict(path)
                return
            stored, found = None, str(error)
        if stored is None or (stored.dtype, stored.length) != (file.dtype, file.length):
            raise UserError(
                f"{self.uri}/{file.name} holds {found}, but its manifest says {file.dtype} ({file.length},); "
                f"upload the corpus again"
            )
        self._pool.open(stored)

    def prefetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetches these files in the background, in this order, as far as there is space."""
        with self._lock:
            self._upcoming = list(files)
            self._start_prefetch()

    def _start_prefetch(self) -> None:
        self._generation += 1
        if self._upcoming and self._prefetch_thread is None:
            self._prefetch_thread = threading.Thread(target=self._prefetch_all, name="gptmill-prefetch", daemon=True)
            self._prefetch_thread.start()

    def _prefetch_all(self) -> None:
        """Ends when all upcoming files are here, or no more fit until `_generation` changes."""
        while True:
            with self._lock:
                generation = self._generation
                file = next((file for file in self._upcoming if not (self._folder / file.local_name).exists()), None)
            try:
                is_fetched = file is not None and self._fetch(file, is_prefetch=True)
            except (UserError, OSError):  # `open` raises the same error when the file is needed
                is_fetched = False
            with self._lock:
                if not is_fetched and generation == self._generation:
                    self._prefetch_thread = None
                    return

    def _fetch(self, file: RemoteFile, *, is_prefetch: bool) -> bool:
        """Makes sure that the file is in the cache; returns False if a prefetch finds no space for it."""
        path = self._folder / file.local_name
        partial = path.with_suffix(PARTIAL)
        with hold_transient_lock(path.with_suffix(LOCK)):
            if path.exists():
                return True
            while not self._reserve(file, partial, is_prefetch=is_prefetch):
                if is_prefetch:
                    return False
                time.sleep(SPACE_POLL_SECONDS)  # until another download ends and can be evicted
            try:
                self._remote.download(file.name, partial, file.sha256)
                flush_to_disk(partial)
                with self._lock_space():  # a concurrent count must see one of the two names
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        return True

    def _reserve(self, file: RemoteFile, partial: Path, *, is_prefetch: bool) -> bool:
        """Reserves space, evicting others if necessary; a prefetch evicts none in use or needed sooner."""
        with self._lock_space(), self._lock:
            upcoming = [each.local_name for each in self._upcoming]
            sooner = upcoming[: upcoming.index(file.local_name)] if file.local_name in upcoming else []
            in_use = {each.local_name for each in self._open_files.values()}
            if not self._free_space(file.size_bytes, kept=in_use | set(sooner) if is_prefetch else set()):
                return False
            partial.touch()
            return True

    def _free_space(self, size_bytes: int, kept: set[str]) -> bool:
        """Evicts files that are not needed first, the least recently used of them first; none if that is not enough."""
        sizes = self._list_sizes()
        upcoming = {each.local_name for each in self._upcoming}
        in_use = {each.local_name for each in self._open_files.values()}
        ages = [(name in in_use, name in upcoming, age, name) for name, (_, age) in sizes.items() if name not in kept]
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
        """Deletes a file; processes that have it mapped keep its bytes until they unmap it."""
        self._pool.drop(str(path))
        with suppress(OSError):  # gone already, or on Windows still in use
            path.unlink()

    def _list_sizes(self) -> dict[str, tuple[int, float]]:
        """Returns size and last use of every file, downloads at full size; deletes those that killed processes left."""
        sizes: dict[str, tuple[int, float]] = {}
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == SHARD:
                    sizes[path.name] = status.st_size, status.st_mtime
                elif path.suffix == PARTIAL:
                    with hold_transient_lock(path.with_suffix(LOCK), wait=False) as is_abandoned:
                        if is_abandoned:
                            path.unlink(missing_ok=True)
                        else:
                            sizes[path.name] = self._sizes.get(path.stem, status.st_size), status.st_mtime
        return sizes

    def _lock_space(self) -> AbstractContextManager[bool]:
        return hold_transient_lock(self._folder / SPACE_LOCK)


@contextmanager
def hold_transient_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds a lock file, which it deletes; without `wait`, yields False if another thread or process holds it."""
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
                continue  # its last holder deleted the file; lock the new one
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
