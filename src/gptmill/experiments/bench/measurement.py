"""One training, measured by its own log: it is ended after enough steps, before it would evaluate or save."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.experiments.bench.ablations import Row
from gptmill.experiments.bench.environment import count_compiled_graphs, read_clocks
from gptmill.experiments.trials import POLL_SECONDS, PROGRESS_SECONDS, Say, TrialError, Trials, read_last_step
from gptmill.runs.directory import RunDirectory

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Measurement:
    """What the steps of a run showed, and where it ran."""

    tokens_per_second: float
    step_seconds: float
    memory_gb: float
    data_wait: float
    first_step_seconds: float
    """From the start of the process to the end of its first step."""
    mfu: float | None = None
    tflops: float | None = None
    tokens_per_step: int = 0
    device: str = ""
    precision: str = ""
    torch_version: str = ""
    version: str = ""
    code: str = ""
    compiled_anew: bool = False
    """Whether torch.compile's cache on the disk lacked something."""
    spread: float = 0.0
    """How far apart the quartiles of the steps' times lie, as a share of their median."""
    clocks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A row, and what came of it: a measurement, or why there is none."""

    row: Row
    measurement: Measurement | None
    problem: str = ""


class TimedTrials(Trials):
    """Runs that are ended once `steps` steps are logged, the last `measured` of which count."""

    def __init__(self, folder: Path, arguments: list[str], steps: int, measured: int, say: Say) -> None:
        super().__init__(folder, arguments, steps, say)
        self._measured = measured

    def measure(self, name: str, *more: str) -> Measurement:
        """Raises UserError where the run fails."""
        run, graphs = RunDirectory(self.folder / name), count_compiled_graphs()
        started = time.time()
        with self._open_process(name, [*self._arguments, f"--run_name={name}", *more]) as process:
            clocks = self._watch(process, run)
        anew = count_compiled_graphs() > graphs
        return make_measurement(run, self._steps, self._measured, started, clocks, compiled_anew=anew)

    def _watch(self, process: subprocess.Popen[bytes], run: RunDirectory) -> dict[str, float]:
        """Tells how far it is until all steps are logged; returns the clocks in the midst of them."""
        clocks: dict[str, float] = {}
        first, began, told = 0, 0.0, time.monotonic()
        while process.poll() is None:
            now, step = time.monotonic(), read_last_step(run)
            if step and not first:  # what came before was loading and compiling
                first, began = step, now
            if not clocks and step > self._steps - self._measured:
                clocks = read_clocks()
            if step >= self._steps and len(read_records(run, "StepLogged")) >= self._steps:
                return clocks
            if step > first and now - told >= PROGRESS_SECONDS:
                told, left = now, (now - began) / (step - first) * (self._steps - step)
                self._say(f"  step {step:,} of {self._steps:,}, about {timedelta(seconds=round(left))} left")
            time.sleep(POLL_SECONDS)
        self._check_end(process, run.path.name)
        raise UserError(f"the run {run.path.name} was ended before it was measured; start the bench again")


def make_measurement(
    run: RunDirectory, steps: int, measured: int, started: float, clocks: dict[str, float], *, compiled_anew: bool
) -> Measurement:
    """The medians of a run's steps, by its events."""
    start = read_records(run, "RunStarted")[0]
    logged = read_records(run, "StepLogged")[:steps]
    last = logged[-measured:]
    seconds = sum(record["seconds"] for record in last)
    return Measurement(
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in last),
        step_seconds=statistics.median(record["seconds"] for record in last),
        spread=_find_spread([record["seconds"] for record in last]),
        memory_gb=last[-1]["memory_gb"],
        data_wait=sum(record["data_wait"] * record["seconds"] for record in last) / max(seconds, 1e-9),
        first_step_seconds=logged[0]["time"] - started,
        mfu=_find_median(last, "mfu"),
        tflops=_find_median(last, "tflops"),
        tokens_per_step=start["tokens_per_step"],
        device=start["device"],
        precision=start["precision"],
        torch_version=start["torch_version"],
        version=start["version"],
        code=start["code"],
        compiled_anew=compiled_anew,
        clocks=clocks,
    )


def read_records(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, as far as whole lines of them are written."""
    try:
        lines = run.events.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def describe_failure(error: UserError) -> str:
    """Why a row has no figures, short enough for a table."""
    if not isinstance(error, TrialError):
        return str(error)
    return OUT_OF_MEMORY if error.is_out_of_memory else error.reason


def _find_spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / max(middle, 1e-9)


def _find_median(records: list[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.median(values) if values else None
