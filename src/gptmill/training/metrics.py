"""Reads the numbers of steps one step late, has them judged, and turns them into events: the device never waits."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from gptmill.runs.events import Event, StepLogged, UpdateSkipped, Warned
from gptmill.runtime.timing import Moment
from gptmill.training.plan import TrainPlan
from gptmill.training.spike_detector import Entry, SpikeDetector, Verdict
from gptmill.training.step_stats import Numbers, StepStats

REMEMBERED_STEPS = 50
FINE = Verdict("fine")


class Metrics:
    """Holds the newest step's stats until the next step is under way.

    Every rank reads every step, at the same place in the loop: that is how they all see the same wish to stop, and
    come to the same verdict.
    """

    def __init__(
        self,
        plan: TrainPlan,
        log_freq: int,
        guard: SpikeDetector,
        emit: Callable[[Event], None],
        measure_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        self.stop_asked = False
        self.newest: Entry | None = None
        """The newest step read."""
        self.verdict = FINE
        """What the guard says of it; once it is to go back, nothing later is read."""
        self._plan = plan
        self._log_freq = log_freq
        self._guard = guard
        self._emit = emit
        self._measure_memory = measure_memory
        self._pending: StepStats | None = None
        self._last_arrival: Moment | None = None
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._unlogged: list[tuple[StepStats, float]] = []

    @property
    def is_in_trouble(self) -> bool:
        """Whether the run cannot go on as it is."""
        return self.verdict.kind in ("go_back", "give_up")

    @property
    def usual_seconds(self) -> float:
        """The median step's time, which is deaf to the first step that may spend minutes compiling."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def push(self, stats: StepStats) -> None:
        """Takes a new step's stats and reads those of the step before; where the host cannot run ahead, reads both."""
        self.flush()
        self._pending = stats
        if not stats.arrived.is_on_device:
            self.flush()

    def flush(self) -> None:
        """Reads what is still held."""
        if self._pending is None or self.is_in_trouble:
            return
        stats, self._pending = self._pending, None
        numbers = stats.read()
        self.stop_asked = self.stop_asked or numbers.stop_asked
        self.newest = stats.make_entry(numbers)
        self._measure(stats)
        self._judge(self.newest)
        if stats.step % self._log_freq == 0 or stats.step == self._plan.max_steps:
            self._log(stats, numbers)

    def go_back(self) -> None:
        """Forgets what is held: the run goes back behind it."""
        self.verdict, self.newest = FINE, None
        self._pending = None
        self._unlogged.clear()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out what was not training: call after an evaluation or a save."""
        self._last_arrival = None

    def _judge(self, entry: Entry) -> None:
        skipped = self._guard.skipped
        self.verdict = self._guard.judge(entry)
        if self._guard.skipped > skipped:
            self._emit(UpdateSkipped(entry.step, entry.loss, entry.grad_norm, list(entry.windows)))
        if self.verdict.kind == "fine" and self.verdict.reason:
            self._emit(Warned(entry.step, "guard", self.verdict.reason))

    def _measure(self, stats: StepStats) -> None:
        """From the end of the step before to the end of this one, or from its own start after a pause."""
        seconds = stats.arrived.seconds_after(self._last_arrival or stats.started)
        self._last_arrival = stats.arrived
        self._step_seconds.append(seconds)
        self._unlogged.append((stats, seconds))

    def _log(self, stats: StepStats, numbers: Numbers) -> None:
        seconds = max(sum(seconds for _, seconds in self._unlogged), 1e-9)
        tokens = sum(stats.tokens for stats, _ in self._unlogged)
        rate = sum(stats.tokens * self._plan.find_flops(stats.step) for stats, _ in self._unlogged) / seconds
        waited = sum(stats.data_wait_seconds for stats, _ in self._unlogged)
        self._unlogged.clear()
        rate, peak = rate / self._plan.ranks, self._plan.peak_flops_per_second
        self._emit(
            StepLogged(
                stats.step,
                epoch=stats.epoch,
                loss=numbers.loss,
                lr=stats.lr,
                grad_norm=numbers.grad_norm,
                tokens_per_second=tokens / seconds,
                seconds_left=self.usual_seconds * (self._plan.max_steps - stats.step),
                data_wait=min(1.0, waited / seconds),
                skipped=self._guard.skipped,
                seconds=seconds,
                by_corpus=dict(zip(self._plan.corpora, numbers.by_corpus, strict=True)),
                experts=_describe_loads(numbers.expert_loads),
                memory_gb=round(self._measure_memory() / 1e9, 3),
                objective=None if numbers.objective == numbers.loss else numbers.objective,
                tflops=rate / 1e12,
                mfu=None if peak is None else rate / peak,
            )
        )


def _describe_loads(loads: tuple[float, ...]) -> dict[str, float]:
    return {"busiest": max(loads), "idlest": min(loads)} if loads else {}
