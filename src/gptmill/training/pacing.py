"""Keeps a run inside its time budget: moves the last step when the machine is slower or faster than planned.

The schedule follows the last step, so that a run that is cut short has still done its decay. In the stable phase of a
WSD schedule the learning rate does not depend on it, and nothing jumps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace

from gptmill.config.optimizer import Wsd
from gptmill.runs.directory import save_config
from gptmill.runs.events import LastStepMoved, Warned
from gptmill.training.alarm import Alarm
from gptmill.training.metrics import Metrics
from gptmill.training.session import Session
from gptmill.training.state import TrainState

REMEMBERED_STEPS = 60
MIN_STEPS = 20  # before the pace is known
SHORTEN_AT, EXTEND_AT = 0.05, 0.1  # deviations that are worth a change, as fractions of the steps that are left
MAX_EXTENSION = 1.5  # in one change: the first steps may be unusually fast
SAFETY = 0.99  # of the steps that fit
PAUSE_MARGIN = 1.5  # the last evaluation and save may take this many times as long as the longest so far

read_clock = time.monotonic


class Pacer:
    """Knows the deadline and the recent pace, pauses for evaluations and saves included."""

    def __init__(self, deadline: float, most_steps: int | None = None) -> None:
        self._deadline = deadline
        self._most_steps = math.inf if most_steps is None else most_steps
        self._times: deque[float] = deque(maxlen=REMEMBERED_STEPS + 1)
        self._longest_pause = 0.0
        self._planned: int | None = None
        """The last step before it was moved for the first time."""
        self._alarm = Alarm()

    def note_pause(self, seconds: float) -> None:
        """Records the time of an evaluation or a save; the last one must fit in too."""
        self._longest_pause = max(self._longest_pause, seconds)

    def note_step(self, now: float) -> None:
        """Records the end of a step."""
        self._times.append(now)

    def forget(self) -> None:
        """Forgets the pace, after a rollback."""
        self._times.clear()

    def is_worth_a_warning(self, max_steps: int, new_max_steps: int) -> bool:
        """Whether a move of the last step leads far from the plan; while it stays far from it, only once."""
        self._planned = self._planned or max_steps
        is_fine = abs(new_max_steps - self._planned) <= SHORTEN_AT * self._planned
        return self._alarm.check(is_bad=not is_fine, is_fine=is_fine, time=self._times[-1])

    @property
    def step_seconds(self) -> float:
        """Mean time of a recent step; 0 while it is unknown."""
        if len(self._times) <= MIN_STEPS:
            return 0.0
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def find_max_steps(self, step: int, max_steps: int, margin_seconds: float, *, may_extend: bool) -> int:
        """The last step that the deadline allows, or `max_steps` as long as that is close enough."""
        pace = self.step_seconds
        if not pace or step >= max_steps:
            return max_steps
        left = self._deadline - margin_seconds - PAUSE_MARGIN * self._longest_pause - self._times[-1]
        planned, possible = max_steps - step, max(1, int(SAFETY * left / pace))
        if possible < (1 - SHORTEN_AT) * planned:
            return step + possible
        if may_extend and possible > (1 + EXTEND_AT) * planned:
            return int(max(max_steps, min(step + possible, int(MAX_EXTENSION * max_steps), self._most_steps)))
        return max_steps


def keep_pace(pacer: Pacer, session: Session, state: TrainState, metrics: Metrics) -> Session:
    """The session with the last step that the deadline allows; a change is recorded, and saved for a resumed run."""
    assert session.world.size == 1, "every rank has its own clock, and would choose its own last step"
    pacer.note_step(read_clock())
    plan, config, schedule = session.plan, session.config, session.config.optimizer.schedule
    # Once the learning rate has fallen to half, more steps would raise it again by too much.
    decay = schedule.decay_fraction if isinstance(schedule, Wsd) else 1.0
    may_extend = state.step < plan.max_steps * (1 - decay / 2)
    max_steps = pacer.find_max_steps(state.step, plan.max_steps, session.stop.margin_seconds, may_extend=may_extend)
    if max_steps == plan.max_steps:
        return session
    session.trackers.track(LastStepMoved(state.step, max_steps))
    if pacer.is_worth_a_warning(plan.max_steps, max_steps):
        message = (
            f"steps take {1000 * pacer.step_seconds:,.0f} ms: the run ends after step {max_steps:,} instead of "
            f"{plan.max_steps:,}, to stay inside its budget"
        )
        session.trackers.track(Warned(state.step, "schedule", message))
    plan = replace(plan, max_steps=max_steps)
    config = replace(config, training=replace(config.training, max_steps=max_steps))
    save_config(session.run, config)
    metrics.plan = plan
    return replace(session, plan=plan, config=config)
