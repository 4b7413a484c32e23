"""Reads step metrics one step late and turns them into events, so that the host never synchronises with the device."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from gptmill.runs.events import Event, StepLogged, UpdateSkipped, Warned
from gptmill.runtime.telemetry import Telemetry
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.training.plan import TrainPlan
from gptmill.training.spike_detector import Observation, SpikeDetector, Verdict
from gptmill.training.step_stats import StepMetrics, StepStats

REMEMBERED_STEPS = 50
FINE = Verdict("fine")


class Metrics:
    """Holds the stats of the newest step until the next one has been launched.

    Every rank reads every step at the same point of the loop, so that all see the same stop request and the same
    verdict of the spike detector.
    """

    def __init__(
        self,
        plan: TrainPlan,
        log_freq: int,
        spike_detector: SpikeDetector,
        emit: Callable[[Event], None],
        measure_memory: Callable[[], int] = lambda: 0,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.stop_requested = False
        self.newest: Observation | None = None
        """The newest step that was read."""
        self.verdict = FINE
        """The spike detector's verdict on it; after a rollback or give-up verdict no later step is read."""
        self.plan = plan
        """Its last step may move while the run keeps inside a time budget."""
        self._log_freq = log_freq
        self._spike_detector = spike_detector
        self._emit = emit
        self._measure_memory = measure_memory
        self._telemetry = Telemetry() if telemetry is None else telemetry
        self._pending: StepStats | None = None
        self._last_arrival: DeviceTimestamp | None = None
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._unlogged: list[tuple[StepStats, float]] = []

    @property
    def has_diverged(self) -> bool:
        """Whether training cannot continue from the current weights."""
        return self.verdict.kind in ("rollback", "give_up")

    @property
    def has_bad_gradients_only(self) -> bool:
        """Whether the newest step has a finite loss, but gradients that are not."""
        newest = self.newest
        return newest is not None and math.isfinite(newest.loss) and not math.isfinite(newest.grad_norm)

    @property
    def median_step_seconds(self) -> float:
        """The median, which ignores a first step that may compile for minutes; 0 before any step."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def push(self, stats: StepStats) -> None:
        """Reads the previous step and holds this one; reads both where the host cannot run ahead of the device."""
        self.flush()
        self._pending = stats
        if not stats.arrived.is_on_device:
            self.flush()

    def flush(self) -> None:
        """Reads the held step, if any."""
        if self._pending is None or self.has_diverged:
            return
        stats, self._pending = self._pending, None
        metrics = stats.read()
        self.stop_requested = self.stop_requested or metrics.stop_requested
        self.newest = stats.make_observation(metrics)
        self._time(stats)
        self._check(self.newest)
        if stats.step % self._log_freq == 0 or stats.step == self.plan.max_steps:
            self._log(stats, metrics)
        if stats.histograms is not None:
            self._emit(stats.histograms.read(stats.step))

    def roll_back(self) -> None:
        """Discards the steps that are being undone."""
        self.verdict, self.newest = FINE, None
        self._pending = None
        self._unlogged.clear()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes time that was not spent training; call after an evaluation or a save."""
        self._last_arrival = None

    def _check(self, newest: Observation) -> None:
        skipped = self._spike_detector.skipped
        self.verdict = self._spike_detector.check(newest)
        if self._spike_detector.skipped > skipped:
            self._emit(UpdateSkipped(newest.step, newest.loss, newest.grad_norm, list(newest.windows)))
        if self.verdict.kind == "fine" and self.verdict.reason:
            self._emit(Warned(newest.step, "guard", self.verdict.reason))

    def _time(self, stats: StepStats) -> None:
        """Measures from the end of the previous step to the end of this one; after a pause, from this step's start."""
        seconds = stats.arrived.seconds_after(self._last_arrival or stats.started)
        self._last_arrival = stats.arrived
        self._step_seconds.append(seconds)
        self._unlogged.append((stats, seconds))

    def _log(self, stats: StepStats, metrics: StepMetrics) -> None:
        seconds = max(sum(seconds for _, seconds in self._unlogged), 1e-9)
        tokens = sum(stats.tokens for stats, _ in self._unlogged)
        flops = sum(stats.tokens * self.plan.find_flops(stats.step) for stats, _ in self._unlogged)
        sequences = sum(stats.tokens / (self.plan.find_context_length(stats.step) or 1) for stats, _ in self._unlogged)
        waited = sum(stats.data_wait_seconds for stats, _ in self._unlogged)
        steps = len(self._unlogged)
        self._unlogged.clear()
        flops_per_second, peak = flops / seconds / self.plan.ranks, self.plan.peak_flops_per_second
        self._emit(
            StepLogged(
                stats.step,
                epoch=stats.epoch,
                loss=metrics.loss,
                lr=stats.lr,
                grad_norm=metrics.grad_norm,
                tokens_per_second=tokens / seconds,
                seconds_left=self.median_step_seconds * (self.plan.max_steps - stats.step),
                data_wait=min(1.0, waited / seconds),
                skipped=self._spike_detector.skipped,
                seconds=seconds,
                steps=steps,
                by_corpus=dict(zip(self.plan.corpora, metrics.by_corpus, strict=True)),
                experts=_describe_loads(metrics.expert_loads),
                memory_gb=round(self._measure_memory() / 1e9, 3),
                objective=None if metrics.objective == metrics.loss else metrics.objective,
                tflops=flops_per_second / 1e12,
                mfu=None if peak is None else flops_per_second / peak,
                samples_per_second=sequences / seconds,
                telemetry=self._telemetry.read(),
            )
        )
        for message in self._telemetry.take_warnings():
            self._emit(Warned(stats.step, "gpu", message))


def _describe_loads(loads: tuple[float, ...]) -> dict[str, float]:
    return {"busiest": max(loads), "idlest": min(loads)} if loads else {}
