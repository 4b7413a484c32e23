"""Time, energy and money: what a run cost, and what it would have cost to stop earlier."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.prices import find_price
from gptmill.runs.reporting.learning import Learning, Point
from gptmill.runs.reporting.record import RunRecord, find_elapsed

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Saving:
    """What ending the run at an earlier point would have saved."""

    at: Point
    seconds: float
    fraction: float
    """Of the training time."""
    dollars: float | None


@dataclass(frozen=True)
class Cost:
    """What is None is not known."""

    devices: int
    device_hours: float
    price_per_hour: float | None
    """Dollars for one device."""
    is_typical: bool
    """Whether the price is a typical one, and not given."""
    dollars: float | None
    dollars_per_million_tokens: float | None
    kilowatt_hours: float | None
    """Of the GPUs on the machine of rank 0, where power is measured."""
    watts: float | None
    """Their mean power."""
    after_best: Saving | None
    """Early stopping at the best validation loss."""
    after_most: Saving | None
    """Stopping at 90 % of the gain."""


def compute_cost(
    record: RunRecord, learning: Learning | None, running_seconds: float, price_per_hour: float | None
) -> Cost:
    """Computes the cost of the time with a process running, at the price given, or else at a typical one."""
    start = record.starts[-1] if record.starts else None
    devices, device = (start.ranks, start.device) if start else (1, "")
    price = price_per_hour if price_per_hour is not None else find_price(device)
    hours = running_seconds / SECONDS_PER_HOUR * devices
    dollars = None if price is None else hours * price

    def save(point: Point | None) -> Saving | None:
        if point is None or learning is None or running_seconds <= 0:
            return None
        end = max(learning.final.elapsed_seconds, find_elapsed(record, record.last_step))
        seconds = max(0.0, end - point.elapsed_seconds)
        fraction = min(1.0, seconds / running_seconds)
        return Saving(point, seconds, fraction, None if dollars is None else dollars * fraction)

    is_evaluated = learning is not None and learning.kind == "validation"
    joules = record.joules
    return Cost(
        devices,
        hours,
        price,
        is_typical=price is not None and price_per_hour is None,
        dollars=dollars,
        dollars_per_million_tokens=dollars / record.tokens * 1e6 if dollars is not None and record.tokens else None,
        kilowatt_hours=None if joules is None else joules / JOULES_PER_KWH,
        watts=joules / running_seconds if joules is not None and running_seconds > 0 else None,
        after_best=save(learning.best) if learning and is_evaluated else None,
        after_most=save(learning.most) if learning else None,
    )
