"""Skipped updates, rollbacks and warnings as lines of the console."""

from __future__ import annotations

import math
import time

from gptmill.runs.events import Event, RolledBack, StepLogged, UpdateSkipped, Warned
from gptmill.runs.trackers.event_lines import describe_rollback

SKIP_SECONDS = 5.0  # between two lines once there were many: a run may skip for hours
MAX_SKIP_LINES = 10  # before they are limited


class Incidents:
    """Describes skipped updates, rollbacks and warnings, and counts the skipped updates."""

    def __init__(self) -> None:
        self._skipped = 0
        self._counted_until = 0
        self._last_line = -math.inf

    def describe(self, event: Event) -> list[str]:
        """Returns the lines for an event; none if it is not an incident."""
        if isinstance(event, StepLogged):
            self._skipped, self._counted_until = event.skipped, event.step
        elif isinstance(event, UpdateSkipped):
            if event.step > self._counted_until:  # else the StepLogged event has counted it
                self._skipped += 1
            return self._describe_skip(event)
        elif isinstance(event, RolledBack):
            return [describe_rollback(event)]
        elif isinstance(event, Warned):
            return [f"warning: {event.message}"]
        return []

    def rewind(self, step: int) -> None:
        self._counted_until = min(self._counted_until, step)

    def _describe_skip(self, event: UpdateSkipped) -> list[str]:
        now = time.monotonic()
        if self._skipped > MAX_SKIP_LINES and now - self._last_line < SKIP_SECONDS:
            return []
        self._last_line = now
        numbers = f"loss {event.loss:.4g}, gradient norm {event.grad_norm:.4g}"
        return [f"step {event.step:,}: {numbers}: update skipped ({self._skipped:,} so far)"]
