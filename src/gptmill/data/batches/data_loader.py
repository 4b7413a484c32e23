"""Prefetching data loader: a thread reads the next micro-batches and copies them to the device during compute.

Batches are pure functions of their sample numbers, so the loader holds no state that a run would have to save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from gptmill.config.run import DataConfig
from gptmill.data.batches.row_reader import Reader, Rows
from gptmill.data.batches.samplers import Sampler

PREFETCH_BATCHES = DataConfig.prefetch_batches
JOIN_SECONDS = 10.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Prefetched:
    """Rows on the device, and the event after which they are complete there; None if they are already."""

    rows: Rows
    ready: torch.cuda.Event | None


class DataLoaderStoppedError(Exception):
    """The run was asked to stop while it waited for data."""


class DataLoader:
    """Yields the micro-batches whose first samples are `starts`, in that order.

    Up to `prefetch_batches` are read ahead; with 0 there is no thread, and each is read when it is asked for.
    """

    def __init__(
        self,
        sampler: Sampler,
        reader: Reader,
        device: torch.device,
        starts: Iterable[int],
        prefetch_batches: int = PREFETCH_BATCHES,
    ) -> None:
        self.waited_seconds = 0.0
        self.sampler = sampler
        self._reader, self._device, self._starts = reader, device, iter(starts)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" and prefetch_batches else None
        self._prefetched: SimpleQueue[Prefetched | BaseException] = SimpleQueue()
        self._free_slots = threading.Semaphore(prefetch_batches)
        self._is_closed = False
        self._upcoming_shards: list[list[int]] = []
        self._thread: threading.Thread | None = None
        if prefetch_batches:
            self._thread = threading.Thread(target=self._prefetch_all, name="gptmill-data-loader", daemon=True)
            self._thread.start()

    def next_batch(self, is_stopped: Callable[[], bool] = lambda: False) -> Rows:
        """Returns the next micro-batch's rows, ready for use on the device's current stream.

        Raises the error that reading them raised, or DataLoaderStoppedError if `is_stopped` turns true while waiting:
        a remote shard may take minutes.
        """
        started = time.perf_counter()
        if self._thread is None:
            self._prefetch_next()
        prefetched = self._wait(is_stopped)
        self.waited_seconds += time.perf_counter() - started
        if isinstance(prefetched, BaseException):
            self._prefetched.put(prefetched)
            raise prefetched
        self._free_slots.release()
        if prefetched.ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(prefetched.ready)
            prefetched.rows.record_stream(current)
        return prefetched.rows

    def read_batch(self, start: int) -> Rows:
        """Reads the micro-batch that starts with sample `start`, whichever comes next."""
        return self._reader.read(self.sampler.find(start)).to(self._device)

    def close(self) -> None:
        """Ends the thread, at the latest after the read in progress."""
        self._is_closed = True
        self._free_slots.release()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _wait(self, is_stopped: Callable[[], bool]) -> Prefetched | BaseException:
        while True:
            try:
                return self._prefetched.get(timeout=POLL_SECONDS)
            except Empty:
                if is_stopped():
                    raise DataLoaderStoppedError from None

    def _prefetch_all(self) -> None:
        while True:
            self._free_slots.acquire()
            if self._is_closed or not self._prefetch_next():
                return

    def _prefetch_next(self) -> bool:
        """Reads one micro-batch into the queue; puts the error there and returns False if that fails."""
        try:
            start = next(self._starts, None)
            if start is None:
                raise EOFError("the data loader has no more micro-batches")
            self._prefetch_shards(start)
            self._prefetched.put(self._read(start))
        except BaseException as error:
            self._prefetched.put(error)
            return False
        return True

    def _prefetch_shards(self, start: int) -> None:
        upcoming = self.sampler.list_next_shards(start)
        if upcoming != self._upcoming_shards:
            self._upcoming_shards = upcoming
            self._reader.prefetch(upcoming)

    def _read(self, start: int) -> Prefetched:
        locations = self.sampler.find(start)
        if self._copy_stream is None:
            return Prefetched(self._reader.read(locations).to(self._device), None)
        with torch.cuda.stream(self._copy_stream):
            rows = self._reader.read(locations).to(self._device)
            return Prefetched(rows, self._copy_stream.record_event())


@contextmanager
def open_data_loader(
    sampler: Sampler,
    reader: Reader,
    device: torch.device,
    starts: Iterable[int],
    prefetch_batches: int = PREFETCH_BATCHES,
) -> Iterator[DataLoader]:
    """Opens a data loader that is closed on exit."""
    loader = DataLoader(sampler, reader, device, starts, prefetch_batches)
    try:
        yield loader
    finally:
        loader.close()
