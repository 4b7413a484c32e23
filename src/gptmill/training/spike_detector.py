"""The guard: from the numbers of every step, whether training is well, and if not, which data to leave out.

A pure function of the numbers seen so far, in order: all ranks see the same ones and judge alike, and a resumed run
judges as the unbroken one. It knows no model, no clock and no files; going back is done by the loop.
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

REACH = 2  # the step that spikes, and the one before it, whose update may have caused it
MAD_TO_DEVIATION = 1.4826  # the median distance from the median of a normal distribution is its deviation by this
# Where a large batch leaves next to no noise, ordinary drift is many deviations; what matters is a visible rise.
LEAST_LOSS_RISE = 0.1  # as a share of the loss
LEAST_NATS = 0.2  # where the loss itself is near nothing
# Clipping takes the force out of a large gradient, and healthy runs with a high rate reach 8 times their median.
LEAST_NORM_FACTOR = 20.0
HARMLESS_CLIPS = 10.0  # norms up to so many times grad_clip are everyday, however quiet the steps before were
NO_NORM = 1e-8  # gradients below are nothing, however much smaller they were before
MOST_LOG = 80.0  # beyond the range of what a float32 norm can be


@dataclass(frozen=True)
class Entry:
    """One step's numbers, and its data: the first window, and the one after the last."""

    step: int
    loss: float
    grad_norm: float
    windows: tuple[int, int]
    is_overflow: bool = False
    """Whether fp16's scale was too high: the update was skipped, and nothing is wrong."""


@dataclass(frozen=True)
class Counts:
    """What outlives going back."""

    skipped: int = 0
    rollbacks: int = 0
    """In a row: since the run was last a whole window of steps past all trouble."""
    last_spike_step: int = 0


@dataclass(frozen=True)
class Verdict:
    """What to do after a step. A reason with "fine" is a warning."""

    kind: Literal["fine", "skipped", "go_back", "give_up"]
    reason: str = ""
    first_step: int = 0
    """The first step whose data is to be left out: go back to a state from before it."""
    windows: tuple[int, int] = (0, 0)
    """The data to leave out: from that step's first window to the end of the step judged."""
    counts: Counts = Counts()


@dataclass(frozen=True)
class Record:
    """A remembered step; without numbers where these say nothing about the usual."""

    step: int
    first_window: int
    end_window: int
    loss: float | None = None
    grad_norm: float | None = None


class SpikeDetector:
    """Judges every step, once and in order.

    Where the data is not shuffled, the loss follows the data and may rise for good: that is told, and not healed.
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
        """Updates skipped in the whole run."""
        return self._counts.skipped

    @property
    def rollbacks(self) -> int:
        """Times that the run has gone back in a row."""
        return self._counts.rollbacks

    def judge(self, entry: Entry) -> Verdict:
        """What to do now that this step is known."""
        if self._config.guard == "off":
            return Verdict("fine")
        if entry.step > self._counts.last_spike_step + self._config.guard_window:
            self._counts = replace(self._counts, rollbacks=0)
        if not (math.isfinite(entry.loss) and math.isfinite(entry.grad_norm)):
            return self._judge_skipped(entry)
        self._skips_in_a_row = 0
        loss_spike, norm_spike = self._find_spikes(entry)
        spike = ", ".join(filter(None, (loss_spike, norm_spike)))
        goes_on = bool(self._records) and self._records[-1].loss is None
        self._remember(entry, is_usual=not spike)
        if not spike:
            return Verdict("fine")
        if self._config.guard == "rollback" and (norm_spike or self._is_shuffled):
            return self._go_back(entry, spike, REACH)
        return Verdict("fine", "" if goes_on else f"step {entry.step}: {spike}")

    def note_rollback(self, verdict: Verdict, from_step: int) -> None:
        """To be told when the run, this guard with it, is back in an older state: it must know how often it was."""
        self._counts = replace(verdict.counts, last_spike_step=max(verdict.counts.last_spike_step, from_step))

    def state_dict(self) -> dict[str, Any]:
        """All that later verdicts depend on, as JSON knows it."""
        return {
            **asdict(self._counts),
            "skips_in_a_row": self._skips_in_a_row,
            "records": [list(asdict(record).values()) for record in self._records],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes the guard that was saved; a fresh one where nothing was."""
        state = read_dict(state, "the guard's state")
        counts = {name: read_count(state.get(name, value), name) for name, value in asdict(Counts()).items()}
        skips_in_a_row = read_count(state.get("skips_in_a_row", 0), "skips_in_a_row")
        records = [_read_record(values) for values in read_list(state.get("records", []), "records")]
        self._counts, self._skips_in_a_row = Counts(**counts), skips_in_a_row
        self._records.clear()
        self._records.extend(records)

    def _remember(self, entry: Entry, *, is_usual: bool) -> None:
        # Steps that are far out leave the band as it is; should they be the new usual, they outnumber it in the end.
        numbers = (entry.loss, entry.grad_norm) if is_usual else ()
        self._records.append(Record(entry.step, *entry.windows, *numbers))

    def _judge_skipped(self, entry: Entry) -> Verdict:
        self._remember(entry, is_usual=False)
        self._counts = replace(self._counts, skipped=self._counts.skipped + 1)
        if entry.is_overflow:
            return Verdict("skipped", "the gradients overflowed fp16, whose scale has been lowered")
        self._skips_in_a_row += 1
        numbers = f"loss {entry.loss:.4g}, gradient norm {entry.grad_norm:.4g}"
        if self._skips_in_a_row < max(1, self._config.max_skips):
            return Verdict("skipped", numbers)
        reason = f"{self._skips_in_a_row} updates in a row were not finite ({numbers})"
        if self._config.guard == "warn":
            return Verdict("skipped", reason)
        return self._go_back(entry, reason, self._skips_in_a_row)

    def _find_spikes(self, entry: Entry) -> tuple[str, str]:
        """How loss and gradient norm stand out of the band; empty where they do not, or it is not known yet."""
        threshold = self._config.spike_threshold
        losses = [record.loss for record in self._records if record.loss is not None]
        if 2 * len(losses) < self._config.guard_window:
            return "", ""
        loss_spike = norm_spike = ""
        usual = median(losses)
        limit = usual + max(LEAST_LOSS_RISE * usual, LEAST_NATS)
        if entry.loss > limit:  # most steps are below, and their deviation need not be known
            limit = max(limit, usual + threshold * _measure_noise(losses))
        if entry.loss > limit:
            loss_spike = f"loss {entry.loss:.4f} where {usual:.4f} is usual and {limit:.4f} the limit"
        norms = [record.grad_norm for record in self._records if record.grad_norm is not None]
        usual = max(median(norms), NO_NORM)
        limit = max(usual * LEAST_NORM_FACTOR, self._harmless_norm)
        if entry.grad_norm > limit:
            limit = max(limit, usual * math.exp(min(threshold * _measure_log_deviation(norms, usual), MOST_LOG)))
        if entry.grad_norm > limit:
            norm_spike = f"gradient norm {entry.grad_norm:.4g} where {usual:.4g} is usual and {limit:.4g} the limit"
        return loss_spike, norm_spike

    def _go_back(self, entry: Entry, what: str, reach: int) -> Verdict:
        """Leaves out more each time, since what was left out before has not helped."""
        done = self._counts.rollbacks
        first = self._records[-min(reach * 2**done, len(self._records))]
        windows = (first.first_window, entry.windows[1])
        last_spike_step = max(self._counts.last_spike_step, entry.step)
        if done < self._config.max_rollbacks:
            counts = replace(self._counts, rollbacks=done + 1, last_spike_step=last_spike_step)
            return Verdict("go_back", what, first.step, windows, counts)
        counts = replace(self._counts, last_spike_step=last_spike_step)
        return Verdict("give_up", self._explain(entry, what), first.step, windows, counts)

    def _explain(self, entry: Entry, what: str) -> str:
        done = self._counts.rollbacks
        times = "once" if done == 1 else f"{done} times in a row"
        before = f"the run has gone back {times} and left data out, and it came again" if done else "max_rollbacks is 0"
        return (
            f"step {entry.step}: {what}; {before}. Go on from an earlier checkpoint with --resume STEP, "
            f"--allow_changes and a lower --max_lr, look at the data (gptmill data show --run RUN --step "
            f"{max(1, entry.step - 1)}), or train on with --guard warn"
        )


def _read_record(values: Any) -> Record:
    step, first, end, loss, norm = read_list(values, "a record of the guard", length=5)
    places = (read_count(value, "a record of the guard") for value in (step, first, end))
    return Record(*places, *(read_number(value, "a record of the guard") for value in (loss, norm)))


def _measure_noise(losses: list[float]) -> float:
    """The deviation of a loss from its course, by what changes from step to step: the course itself is no noise."""
    changes = [abs(after - before) for before, after in pairwise(losses)]
    return MAD_TO_DEVIATION * median(changes or [0.0]) / math.sqrt(2)


def _measure_log_deviation(norms: list[float], usual: float) -> float:
    """Norms differ by factors, and drift: the deviation of their logarithms from the usual one."""
    return MAD_TO_DEVIATION * median([abs(math.log(max(norm, NO_NORM) / usual)) for norm in norms])
