"""What monitoring checks are made of: recent values, their usual level, and an alarm that does not repeat itself.

Knows no clock: the steps bring their times, so that recorded runs can be checked too.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_STEPS = 10
MIN_SECONDS = 30.0
MAX_VALUES = 30  # in those seconds
USUAL_STEPS = 256
MIN_USUAL_STEPS = 20
MIN_USUAL_SECONDS = 60.0
REPEAT_SECONDS = 600.0
SETTLING_SECONDS = 3.0


class Recent:
    """The values of the last logged steps: as few as make up some steps and some seconds of training.

    Steps of milliseconds are merged into their mean, so that they cost no more than long ones.
    """

    def __init__(self, min_steps: int = MIN_STEPS, min_seconds: float = MIN_SECONDS) -> None:
        self._min_steps, self._min_seconds = min_steps, min_seconds
        self.clear()

    @property
    def is_full(self) -> bool:
        return len(self._values) >= self._min_steps and self.seconds >= self._min_seconds

    def add(self, value: float, seconds: float) -> list[tuple[float, float]]:
        """Adds a value that held for so long; returns the values that it pushes out, oldest first."""
        self.seconds += seconds
        if self._values and self._values[-1][1] < self._min_seconds / MAX_VALUES:
            last, before = self._values.pop()
            value, seconds = (last * before + value * seconds) / max(before + seconds, 1e-9), before + seconds
        self._values.append((value, seconds))
        gone = []
        while len(self._values) > self._min_steps and self.seconds - self._values[0][1] >= self._min_seconds:
            gone.append(self._values.popleft())
            self.seconds -= gone[-1][1]
        return gone

    def clear(self) -> None:
        self._values: deque[tuple[float, float]] = deque()
        self.seconds = 0.0

    def average(self) -> float:
        """The mean over time."""
        return sum(value * seconds for value, seconds in self._values) / max(self.seconds, 1e-9)

    def find_median(self) -> float:
        return median(value for value, _ in self._values)


class Usual:
    """The median of the values that are no longer recent."""

    level: float | None
    """None while too little of the run has been seen."""

    def __init__(self, min_seconds: float = MIN_USUAL_SECONDS) -> None:
        self._min_seconds = min_seconds
        self.clear()

    def add(self, values: list[tuple[float, float]]) -> None:
        for value, seconds in values:
            self._values.append(value)
            self._seconds += seconds
        if values and len(self._values) >= MIN_USUAL_STEPS and self._seconds >= self._min_seconds:
            self.level = median(self._values)

    def clear(self) -> None:
        self._values: deque[float] = deque(maxlen=USUAL_STEPS)
        self._seconds = 0.0
        self.level = None


class Settling:
    """The steps whose telemetry still has samples of an evaluation: the first after it, and those of some seconds."""

    def __init__(self) -> None:
        self._paused_at = float("-inf")
        self._is_first = False

    def note_pause(self, time: float) -> None:
        self._paused_at, self._is_first = time, True

    def includes(self, time: float) -> bool:
        """Whether the step that ended now is one of them; to be asked once of each step."""
        is_first, self._is_first = self._is_first, False
        return is_first or time - self._paused_at < SETTLING_SECONDS


class Alarm:
    """Sounds when a condition begins, and again only if it was fine in between, at most every ten minutes."""

    def __init__(self) -> None:
        self._is_on = False
        self._sounded_at = float("-inf")

    def check(self, *, is_bad: bool, is_fine: bool, time: float) -> bool:
        """Whether to warn now. Between bad and fine nothing changes (hysteresis)."""
        if is_fine:
            self._is_on = False
        if not is_bad or self._is_on or time - self._sounded_at < REPEAT_SECONDS:
            return False
        self._is_on, self._sounded_at = True, time
        return True
