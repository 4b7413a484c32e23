"""What a tracker is, and the group that keeps one tracker's failure from harming the run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol

from gptmill.runs.events import Event


class Tracker(Protocol):
    """Takes events. A tracker that is opened for a resumed run first drops what it holds of later steps."""

    def track(self, event: Event) -> None: ...

    def close(self) -> None: ...


class TrackerGroup:
    """Feeds every tracker; one that raises is reported and left out from then on."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def track(self, event: Event) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.track(event)
            except Exception as error:  # a broken log must not end a run of weeks
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                sys.stderr.write(
                    f"warning: {name} stopped at step {event.step} ({error}); training goes on without it\n"
                )

    def __enter__(self) -> TrackerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._trackers:
            tracker.close()
