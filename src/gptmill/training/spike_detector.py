"""Detects loss spikes and non-finite updates, and decides whether to roll back and which data to skip.

Verdicts depend only on the metrics of the steps so far, so that all ranks agree and a resumed run decides like an
uninterrupted one. Knows no model, no clock and no files; the loop does the rollback.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from gptmill.config.run import GuardConfig
from gptmill.training.saved_values import read_count, read_dict, read_list, read_number

SPIKE_STEPS = 2  # the spiking step and the one before it, whose update may have caused the spike
MAD_TO_DEVIATION = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
# With large batches the loss is nearly noise-free and ordinary drift is many deviations: require a visible rise too.
MIN_RELATIVE_RISE = 0.1  # of the loss
MIN_RISE_NATS = 0.2  # where the loss itself is close to 0
# Clipping bounds the effect of a large gradient, and healthy runs at a high learning rate reach 8 times their median.
MIN_NORM_FACTOR = 20.0
HARMLESS_CLIPS = 10.0  # norms up to this many times grad_clip are ordinary, however small the previous ones were
MIN_NORM = 1e-8  # norms below count as 0
MAX_LOG = 80.0  # beyond the largest float32 norm


@dataclass(frozen=True)
class Observation:
    """The metrics of one step and its data: first window, and one past the last."""

    step: int
    loss: float
    grad_norm: float
    windows: tuple[int, int]
    is_overflow: bool = False
    """Whether fp16's loss scale was too high: the update was skipped, but training is healthy."""


@dataclass(frozen=True)
class Counts:
    """Counters that survive a rollback."""

    skipped: int = 0
    rollbacks: int = 0
    """Consecutive ones: reset once the run is `guard_window` steps past the last spike."""
    last_spike_step: int = 0


@dataclass(frozen=True)
class Verdict:
    """What to do after a step. A "fine" verdict with a reason is a warning."""

    kind: Literal["fine", "skipped", "rollback", "give_up"]
    reason: str = ""
    first_step: int = 0
    """The first step whose data is skipped: roll back to a state from before it."""
    windows: tuple[int, int] = (0, 0)
    """The data to skip: from that step's first window to the end of the checked step."""
    counts: Counts = Counts()


@dataclass(frozen=True)
class Record:
    """A past step; without loss and norm if it was an outlier."""

    step: int
    first_window: int
    end_window: int
    loss: float | None = None
    grad_norm: float | None = None


class SpikeDetector:
    """Compares every step, once and in order, with the median of the last `guard_window` steps.

    Without shuffling, the loss follows the data and may rise permanently: that is a warning, not a reason to roll back.
    """

    def __init__(self, config: GuardConfig, *, is_shuffled: bool = True, grad_clip: float | None = None) -> None:
        self._config = config
        self._is_shuffled = is_shuffled
        self._harmless_norm = HARMLESS_CLIPS * (grad_clip or 0.0)
        self._counts = Counts()
        self._skips_in_a_row = 0
        self._records: deque[Record] = deque(maxlen=max(1, config.guard_window))

    @property
    def skipped(self) -> int:
        """Number of updates skipped in the whole run."""
        return self._counts.skipped

    @property
    def rollbacks(self) -> int:
        """Number of consecutive rollbacks."""
        return self._counts.rollbacks

    def check(self, newest: Observation) -> Verdict:
        """Decides what to do after a step."""
        if self._config.guard == "off":
            return Verdict("fine")
        if newest.step > self._counts.last_spike_step + self._config.guard_window:
            self._counts = replace(self._counts, rollbacks=0)
        if not (math.isfinite(newest.loss) and math.isfinite(newest.grad_norm)):
            return self._check_skipped(newest)
        self._skips_in_a_row = 0
        loss_spike, norm_spike = self._find_spikes(newest)
        spike = ", ".join(filter(None, (loss_spike, norm_spike)))
        is_reported = bool(self._records) and self._records[-1].loss is None
        self._record(newest, is_outlier=bool(spike))
        if not spike:
            return Verdict("fine")
        if self._config.guard == "rollback" and (norm_spike or self._is_shuffled):
            return self._roll_back(newest, spike, SPIKE_STEPS)
        return Verdict("fine", "" if is_reported else f"step {newest.step}: {spike}")

    def note_rollback(self, verdict: Verdict, from_step: int) -> None:
        """Counts a rollback; call after this detector has been restored to an older state with the rest of the run."""
        self._counts = replace(verdict.counts, last_spike_step=max(verdict.counts.last_spike_step, from_step))

    def state_dict(self) -> dict[str, Any]:
        """Everything that later verdicts depend on, as JSON values."""
        return {
            **asdict(self._counts),
            "skips_in_a_row": self._skips_in_a_row,
            "records": [list(asdict(record).values()) for record in self._records],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state; an empty one resets the detector."""
        state = read_dict(state, "guard")
        counts = {name: read_count(state.get(name, value), name) for name, value in asdict(Counts()).items()}
        skips_in_a_row = read_count(state.get("skips_in_a_row", 0), "skips_in_a_row")
        records = [_read_record(values) for values in read_list(state.get("records", []), "records")]
        self._counts, self._skips_in_a_row = Counts(**counts), skips_in_a_row
        self._records.clear()
        self._records.extend(records)

    def _record(self, newest: Observation, *, is_outlier: bool) -> None:
        # Outliers do not move the median; if they are the new level, they push the older steps out of the window.
        metrics = () if is_outlier else (newest.loss, newest.grad_norm)
        self._records.append(Record(newest.step, *newest.windows, *metrics))

    def _check_skipped(self, newest: Observation) -> Verdict:
        self._record(newest, is_outlier=True)
        self._counts = replace(self._counts, skipped=self._counts.skipped + 1)
        if newest.is_overflow:
            return Verdict("skipped", "the gradients overflowed fp16; the loss scale has been lowered")
        self._skips_in_a_row += 1
        metrics = f"loss {newest.loss:.4g}, gradient norm {newest.grad_norm:.4g}"
        if self._skips_in_a_row < max(1, self._config.max_skips):
            return Verdict("skipped", metrics)
        reason = f"{self._skips_in_a_row} updates in a row were not finite ({metrics})"
        if self._config.guard == "warn":
            return Verdict("skipped", reason)
        return self._roll_back(newest, reason, self._skips_in_a_row)

    def _find_spikes(self, newest: Observation) -> tuple[str, str]:
        """Describes spikes of the loss and of the gradient norm; empty if there are none or too few past steps."""
        threshold = self._config.spike_threshold
        losses = [record.loss for record in self._records if record.loss is not None]
        if 2 * len(losses) < self._config.guard_window:
            return "", ""
        loss_spike = norm_spike = ""
        center = median(losses)
        limit = center + max(MIN_RELATIVE_RISE * center, MIN_RISE_NATS)
        if newest.loss > limit:  # the deviation is not needed for most steps
            limit = max(limit, center + threshold * _estimate_noise(losses))
        if newest.loss > limit:
            loss_spike = f"loss {newest.loss:.4f} above the limit of {limit:.4f} (median {center:.4f})"
        norms = [record.grad_norm for record in self._records if record.grad_norm is not None]
        center = max(median(norms), MIN_NORM)
        limit = max(center * MIN_NORM_FACTOR, self._harmless_norm)
        if newest.grad_norm > limit:
            limit = max(limit, center * math.exp(min(threshold * _estimate_log_deviation(norms, center), MAX_LOG)))
        if newest.grad_norm > limit:
            norm_spike = f"gradient norm {newest.grad_norm:.4g} above the limit of {limit:.4g} (median {center:.4g})"
        return loss_spike, norm_spike

    def _roll_back(self, newest: Observation, what: str, skipped_steps: int) -> Verdict:
        """Doubles the skipped data with every consecutive rollback, since skipping less has not helped."""
        done = self._counts.rollbacks
        first = self._records[-min(skipped_steps * 2**done, len(self._records))]
        windows = (first.first_window, newest.windows[1])
        last_spike_step = max(self._counts.last_spike_step, newest.step)
        if done < self._config.max_rollbacks:
            counts = replace(self._counts, rollbacks=done + 1, last_spike_step=last_spike_step)
            return Verdict("rollback", what, first.step, windows, counts)
        counts = replace(self._counts, last_spike_step=last_spike_step)
        return Verdict("give_up", self._explain(newest, what), first.step, windows, counts)

    def _explain(self, newest: Observation, what: str) -> str:
        done = self._counts.rollbacks
        times = "once" if done == 1 else f"{done} times in a row"
        before = f"rolling back and skipping data {times} did not help" if done else "max_rollbacks is 0"
        return f"step {newest.step}: {what}; {before}"


def _read_record(values: Any) -> Record:
    step, first, end, loss, norm = read_list(values, "a guard record", length=5)
    counts = (read_count(value, "a guard record") for value in (step, first, end))
    return Record(*counts, *(read_number(value, "a guard record") for value in (loss, norm)))


def _estimate_noise(losses: list[float]) -> float:
    """Standard deviation of the loss around its trend, from the differences of consecutive steps."""
    changes = [abs(after - before) for before, after in pairwise(losses)]
    return MAD_TO_DEVIATION * median(changes or [0.0]) / math.sqrt(2)


def _estimate_log_deviation(norms: list[float], center: float) -> float:
    """Standard deviation of the log norms around the log of their median: norms vary by factors."""
    return MAD_TO_DEVIATION * median([abs(math.log(max(norm, MIN_NORM) / center)) for norm in norms])
