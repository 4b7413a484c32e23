"""What a tracker is, and the group that keeps one tracker's failure from harming the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from gptmill.runs.events import Event


class Tracker(Protocol):
    """Takes events. A tracker that is opened for a resumed run first drops what it holds of later steps."""

    def track(self, event: Event) -> None: ...

    def rewind(self, step: int) -> None:
        """Forgets all steps after `step`: the run went back."""

    def close(self) -> None: ...


class TrackerGroup:
    """Feeds every tracker; one that raises is reported and left out from then on."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def track(self, event: Event) -> None:
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.track, event), f"at step {event.step}")

    def rewind(self, step: int) -> None:
        """Has every tracker forget all steps after `step`; what made the run go back is told afterwards."""
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.rewind, step), f"while going back to step {step}")

    def __enter__(self) -> TrackerGroup:
        return self

    def __exit__(self, *_error: object) -> None:
        for tracker in list(self._trackers):
            self._attempt(tracker, tracker.close, "while closing")

    def _attempt(self, tracker: Tracker, action: Callable[[], None], when: str) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # a broken log must not end a run of weeks
            self._trackers.remove(tracker)
            name = type(tracker).__name__
            with suppress(OSError):  # the pipe that broke may be this one too
                sys.stderr.write(f"warning: {name} failed {when} ({error}); the run goes on without it\n")
            with suppress(Exception):
                tracker.close()
