"""Series of logged steps to show to monitoring checks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from gptmill.runs.events import Event, StepLogged, Warned
from gptmill.training.learning_checks import Check
from gptmill.training.monitor import Monitor


def make_step(step: int, seconds: float = 2.0, time: float | None = None, **fields: Any) -> StepLogged:
    """A step as all others, but for the fields given."""
    usual = {"epoch": 0.1, "loss": 3.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1e4, "seconds_left": 60.0}
    moment = 1e6 + step * seconds if time is None else time
    return StepLogged(step, **{**usual, **fields}, seconds=seconds, time=moment)


def make_noise(seed: int = 0) -> random.Random:
    return random.Random(seed)


def show(check: Check, events: Iterable[Event]) -> list[Warned]:
    """The warnings of a monitor with this check alone, without the first steps, which no check sees."""
    monitor = Monitor([check])
    return [warning for event in events for warning in monitor.check(event)]
