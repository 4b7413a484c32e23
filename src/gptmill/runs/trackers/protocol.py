"""The tracker protocol, and a group of trackers in which one failure does not affect the run or the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from gptmill.runs.append_file import Extent
from gptmill.runs.events import Event
from gptmill.runs.trackers.run_files import LineFile


class Tracker(Protocol):
    """Receives events. When opened for a resumed run, a tracker first drops what it holds of later steps."""

    def track(self, event: Event) -> None: ...

    def rewind(self, step: int) -> None:
        """Drops all steps after `step`: the run was rolled back."""

    def close(self) -> None: ...


class TrackerGroup:
    """Passes events to every tracker; one that raises is reported and removed."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def track(self, event: Event) -> None:
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.track, event), f"at step {event.step}")

    def rewind(self, step: int) -> None:
        """Drops all steps after `step` in every tracker; the RolledBack event follows."""
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.rewind, step), f"while rewinding to step {step}")

    def measure_files(self) -> dict[str, Extent]:
        """The extents of events.jsonl and log.txt, without one that failed."""
        return {tracker.path.name: tracker.extent for tracker in self._trackers if isinstance(tracker, LineFile)}

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
            name = getattr(tracker, "name", type(tracker).__name__)
            with suppress(OSError):  # stderr may be the pipe that broke
                sys.stderr.write(f"warning: {name} failed {when} ({error}); the run continues without it\n")
            with suppress(Exception):
                tracker.close()
