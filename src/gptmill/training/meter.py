"""Reads the numbers of steps one step late and turns them into events, so that the device never waits for us."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from gptmill.runs.events import StepLogged
from gptmill.runtime.timing import Moment
from gptmill.training.plan import TrainPlan
from gptmill.training.step import StepStats

REMEMBERED_STEPS = 50


class Meter:
    """Holds the newest step's stats until the next step is under way.

    Every rank reads every step, at the same place in the loop: that is how they all see the same wish to stop.
    """

    def __init__(self, plan: TrainPlan, log_freq: int, emit: Callable[[StepLogged], None]) -> None:
        self.stop_asked = False
        self._plan = plan
        self._log_freq = log_freq
        self._emit = emit
        self._pending: StepStats | None = None
        self._last_arrival: Moment | None = None
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._unlogged: list[tuple[StepStats, float]] = []

    def push(self, stats: StepStats) -> None:
        """Takes a new step's stats and reads those of the step before; where the host cannot run ahead, reads both."""
        self.flush()
        self._pending = stats
        if not stats.arrived.is_on_device:
            self.flush()

    def flush(self) -> None:
        """Reads what is still held."""
        if self._pending is None:
            return
        stats, self._pending = self._pending, None
        numbers = stats.read()
        self.stop_asked = self.stop_asked or numbers.stop_asked
        self._measure(stats)
        if stats.step % self._log_freq == 0 or stats.step == self._plan.max_steps:
            self._log(stats, numbers.loss, numbers.grad_norm)

    def restart_clock(self) -> None:
        """Leaves out what was not training: call after an evaluation or a save."""
        self._last_arrival = None

    def _measure(self, stats: StepStats) -> None:
        """From the end of the step before to the end of this one, or from its own start after a pause."""
        seconds = stats.arrived.seconds_after(self._last_arrival or stats.started)
        self._last_arrival = stats.arrived
        self._step_seconds.append(seconds)
        self._unlogged.append((stats, seconds))

    def _log(self, stats: StepStats, loss: float, norm: float) -> None:
        seconds = max(sum(seconds for _, seconds in self._unlogged), 1e-9)
        tokens = sum(stats.tokens for stats, _ in self._unlogged)
        waited = sum(stats.data_wait_seconds for stats, _ in self._unlogged)
        self._unlogged.clear()
        # The median is deaf to the first step, which may spend minutes compiling.
        seconds_left = statistics.median(self._step_seconds) * (self._plan.max_steps - stats.step)
        self._emit(
            StepLogged(
                stats.step,
                epoch=stats.epoch,
                loss=loss,
                lr=stats.lr,
                grad_norm=norm,
                tokens_per_second=tokens / seconds,
                seconds_left=seconds_left,
                data_wait=min(1.0, waited / seconds),
            )
        )
