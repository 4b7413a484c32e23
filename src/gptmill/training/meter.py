"""Reads the numbers of steps one step late and turns them into events, so that the device never waits for us."""

from __future__ import annotations

import time
from collections.abc import Callable

from gptmill.runs.events import StepLogged
from gptmill.training.plan import TrainPlan
from gptmill.training.step import StepStats

SMOOTHING = 0.95


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
        self._clock = time.monotonic()
        self._unlogged_steps = 0
        self._step_seconds: float | None = None

    def push(self, stats: StepStats) -> None:
        """Takes a new step's stats and reads those of the step before; on the CPU there is nothing to wait for."""
        self.flush()
        self._pending = stats
        if stats.arrived is None:
            self.flush()

    def flush(self) -> None:
        """Reads what is still held."""
        if self._pending is None:
            return
        stats, self._pending = self._pending, None
        loss, norm, stop_asked = stats.read()
        self.stop_asked = self.stop_asked or stop_asked
        self._unlogged_steps += 1
        if stats.step % self._log_freq and stats.step != self._plan.max_steps:
            return
        seconds = self._measure()
        self._emit(
            StepLogged(
                stats.step,
                epoch=stats.step / self._plan.steps_per_epoch,
                loss=loss,
                lr=stats.lr,
                grad_norm=norm,
                tokens_per_second=self._plan.tokens_per_step / seconds,
                seconds_left=(self._step_seconds or seconds) * (self._plan.max_steps - stats.step),
            )
        )

    def restart_clock(self) -> None:
        """Leaves out what was not training: call after an evaluation or a save."""
        self._clock = time.monotonic()
        self._unlogged_steps = 0

    def _measure(self) -> float:
        """Seconds per step since the last measurement."""
        now = time.monotonic()
        seconds = max(now - self._clock, 1e-9) / max(self._unlogged_steps, 1)
        self._clock, self._unlogged_steps = now, 0
        previous = self._step_seconds
        self._step_seconds = seconds if previous is None else SMOOTHING * previous + (1 - SMOOTHING) * seconds
        return seconds
