"""Delivery: a thread reads the next micro-batches and starts their way to the device while the model computes.

Batches are pure functions of their number, so a feed holds nothing that would be lost with it: it can be closed
anywhere and opened again at any number.
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
class Delivery:
    """Rows on the device, and when they are complete there; None for at once."""

    rows: Rows
    ready: torch.cuda.Event | None


class DataLoaderStoppedError(Exception):
    """The run was asked to stop while it waited for data."""


class DataLoader:
    """The micro-batches that begin with the units `starts`, in that order; `prefetch_batches` of them are on their way.

    With a `prefetch_batches` of 0 there is no thread: each is read when it is taken.
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
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and prefetch_batches else None
        self._deliveries: SimpleQueue[Delivery | BaseException] = SimpleQueue()
        self._free = threading.Semaphore(prefetch_batches)
        self._is_closed = False
        self._upcoming: list[list[int]] = []
        self._thread: threading.Thread | None = None
        if prefetch_batches:
            self._thread = threading.Thread(target=self._deliver_all, name="gptmill-feed", daemon=True)
            self._thread.start()

    def next_batch(self, is_stopped: Callable[[], bool] = lambda: False) -> Rows:
        """The next micro-batch's rows, for the current stream of the device. Raises what went wrong in reading them.

        Raises FeedStoppedError where the wish to stop comes while it waits: a shard may be minutes away.
        """
        started = time.perf_counter()
        if self._thread is None:
            self._deliver_next()
        delivery = self._wait(is_stopped)
        self.waited_seconds += time.perf_counter() - started
        if isinstance(delivery, BaseException):
            self._deliveries.put(delivery)
            raise delivery
        self._free.release()
        if delivery.ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(delivery.ready)
            delivery.rows.hand_over(current)
        return delivery.rows

    def close(self) -> None:
        """Ends the thread, at the latest after the read that it is in."""
        self._is_closed = True
        self._free.release()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _wait(self, is_stopped: Callable[[], bool]) -> Delivery | BaseException:
        while True:
            try:
                return self._deliveries.get(timeout=POLL_SECONDS)
            except Empty:
                if is_stopped():
                    raise DataLoaderStoppedError from None

    def _deliver_all(self) -> None:
        while True:
            self._free.acquire()
            if self._is_closed or not self._deliver_next():
                return

    def _deliver_next(self) -> bool:
        """Reads one micro-batch; False where that, or that there is none, is the last thing to be delivered."""
        try:
            start = next(self._starts, None)
            if start is None:
                raise EOFError("the feed has no more micro-batches")
            self._announce(start)
            self._deliveries.put(self._deliver(start))
        except BaseException as error:
            self._deliveries.put(error)
            return False
        return True

    def _announce(self, start: int) -> None:
        """Tells the reader what comes next, whenever that changes."""
        upcoming = self.sampler.list_next_shards(start)
        if upcoming != self._upcoming:
            self._upcoming = upcoming
            self._reader.prefetch(upcoming)

    def _deliver(self, start: int) -> Delivery:
        places = self.sampler.find(start)
        if self._copies is None:
            return Delivery(self._reader.read(places).to(self._device), None)
        with torch.cuda.stream(self._copies):
            rows = self._reader.read(places).to(self._device)
            return Delivery(rows, self._copies.record_event())


@contextmanager
def open_data_loader(
    sampler: Sampler,
    reader: Reader,
    device: torch.device,
    starts: Iterable[int],
    prefetch_batches: int = PREFETCH_BATCHES,
) -> Iterator[DataLoader]:
    """A feed that is closed at the end, whatever ends it."""
    loader = DataLoader(sampler, reader, device, starts, prefetch_batches)
    try:
        yield loader
    finally:
        loader.close()
