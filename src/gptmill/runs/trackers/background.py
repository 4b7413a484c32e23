"""Runs a slow tracker in a thread of its own, so that training never waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from gptmill.runs.events import Event
from gptmill.runs.slow_notice import say_if_slow
from gptmill.runs.trackers.protocol import Tracker

MAX_QUEUED = 20_000  # events; a tracker that is further behind is stuck
CLOSE_SECONDS = 60.0  # without any progress, before closing gives up

Action = Callable[[Tracker], None]


class Background:
    """Passes events on through a queue. What the tracker raises, and its falling too far behind, is raised later.

    The tracker is also built in the thread: importing its library and connecting may take many seconds. `abandon` is
    called where the tracker is given up, and ends what would keep the process from exiting.
    """

    def __init__(self, name: str, build: Callable[[], Tracker], abandon: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._build = build
        self._abandon = abandon
        self._actions: queue.Queue[Action | None] = queue.Queue(MAX_QUEUED)
        self._error: BaseException | None = None
        self._done = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def track(self, event: Event) -> None:
        self._put(partial(_track, event))

    def rewind(self, step: int) -> None:
        self._put(partial(_rewind, step))

    def close(self) -> None:
        """Waits until everything is recorded, for as long as there is progress."""
        if self._is_closed:
            return
        self._put(None)
        self._is_closed = True
        with say_if_slow(f"waiting for {self.name}"):
            self._wait()
        self._raise_error()

    def _wait(self) -> None:
        done, deadline = -1, 0.0
        while self._thread.is_alive():
            if self._done != done:
                done, deadline = self._done, time.monotonic() + CLOSE_SECONDS
            if time.monotonic() > deadline:
                self._give_up(f"it has not finished in {CLOSE_SECONDS:.0f} seconds")
            self._thread.join(0.1)

    def _put(self, action: Action | None) -> None:
        self._raise_error()
        try:
            self._actions.put_nowait(action)
        except queue.Full:
            self._give_up(f"it is {MAX_QUEUED:,} events behind")

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_closed = True
            raise RuntimeError(str(self._error) or type(self._error).__name__) from self._error

    def _give_up(self, reason: str) -> NoReturn:
        self._is_closed = True
        self._abandon()
        raise TimeoutError(reason)

    def _run(self) -> None:
        try:
            tracker = self._build()
            while (action := self._actions.get()) is not None:
                action(tracker)
                self._done += 1
            tracker.close()
        except BaseException as error:
            self._error = error
            self._abandon()


def _track(event: Event, tracker: Tracker) -> None:
    tracker.track(event)


def _rewind(step: int, tracker: Tracker) -> None:
    tracker.rewind(step)
