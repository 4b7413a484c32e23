"""Measures a run by its event log: it is killed after enough steps, before it evaluates or saves."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.experiments.bench.ablations import Row
from gptmill.experiments.bench.environment import count_compiled_graphs, read_clocks
from gptmill.experiments.child_run import Say
from gptmill.experiments.trials import TrialError, Trials
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events, read_last_step
from gptmill.runs.events import RunStarted, StepLogged

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Measurement:
    """Medians over the measured steps of a run, and the environment."""

    tokens_per_second: float
    step_seconds: float
    memory_gb: float
    data_wait: float
    first_step_seconds: float
    """From the start of the process to the end of the first step."""
    mfu: float | None = None
    tflops: float | None = None
    tokens_per_step: int = 0
    device: str = ""
    precision: str = ""
    torch_version: str = ""
    version: str = ""
    code: str = ""
    compiled_anew: bool = False
    """Whether torch.compile missed its cache on disk."""
    spread: float = 0.0
    """Interquartile range of the step times, as a fraction of their median."""
    clocks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RowResult:
    """A row with its measurement, or with the reason why there is none."""

    row: Row
    measurement: Measurement | None
    problem: str = ""


class TimedTrials(Trials):
    """Runs that are killed once `steps` steps are logged; the last `measured` of them count, the others warm up."""

    def __init__(self, folder: Path, arguments: list[str], steps: int, measured: int, say: Say) -> None:
        super().__init__(folder, arguments, steps, say)
        self._measured = measured

    def measure(self, name: str) -> Measurement:
        """Trains and measures; raises UserError if the run fails."""
        run, graphs = RunDirectory(self.folder / name), count_compiled_graphs()
        clocks: dict[str, float] = {}

        def is_due() -> bool:
            step = read_last_step(run.events)
            if not clocks and step > self._steps - self._measured:  # under load
                clocks.update(read_clocks())
            return step >= self._steps

        started = time.time()
        if not self._train(run, self._make_arguments(name), is_due):
            raise UserError(f"run {name} ended before it was measured; start the bench again")
        is_cache_miss = count_compiled_graphs() > graphs
        return make_measurement(run, self._steps, self._measured, started, clocks, compiled_anew=is_cache_miss)


def make_measurement(
    run: RunDirectory, steps: int, measured: int, started: float, clocks: dict[str, float], *, compiled_anew: bool
) -> Measurement:
    """Computes the medians of a run's last `measured` steps from its events."""
    events = read_events(run.events)
    start = next(event for event in events if isinstance(event, RunStarted))
    logged = [event for event in events if isinstance(event, StepLogged)][:steps]
    last = logged[-measured:]
    seconds = [step.seconds for step in last]
    return Measurement(
        tokens_per_second=statistics.median(step.tokens_per_second for step in last),
        step_seconds=statistics.median(seconds),
        spread=_compute_spread(seconds),
        memory_gb=last[-1].memory_gb,
        data_wait=sum(step.data_wait * step.seconds for step in last) / max(sum(seconds), 1e-9),
        first_step_seconds=logged[0].time - started,
        mfu=_compute_median([step.mfu for step in last]),
        tflops=statistics.median(step.tflops for step in last),
        tokens_per_step=start.tokens_per_step,
        device=start.device,
        precision=start.precision,
        torch_version=start.torch_version,
        version=start.version,
        code=start.code,
        compiled_anew=compiled_anew,
        clocks=clocks,
    )


def describe_failure(error: UserError) -> str:
    """Returns the reason why a row has no measurement, short enough for a table."""
    if not isinstance(error, TrialError):
        return str(error)
    return OUT_OF_MEMORY if error.is_out_of_memory else error.reason


def _compute_spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / max(median, 1e-9)


def _compute_median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
