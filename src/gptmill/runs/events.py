"""The events of a run. Every tracker receives the same events; events.jsonl is all that readers of a run need.

Step n is the n-th optimizer update. An event of step n describes the run after that update.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from gptmill.config.json_text import parse_json

MAX_INT = 2**63 - 1
MAX_TIME = 253_402_300_800.0  # the year 10,000, which datetime cannot represent


@dataclass(frozen=True)
class Event:
    """Base class: the step after which something happened, and the time."""

    step: int
    time: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True)
class RunStarted(Event):
    """A process started to train, from the first step or resumed."""

    run: str
    max_steps: int
    tokens_per_step: int
    parameters: int
    device: str
    precision: str
    ranks: int
    corpus: str
    tokenizer: str
    version: str
    torch_version: str
    val_loss: float | None
    code: str = ""
    """Fingerprint of gptmill's source code."""
    data: str = ""
    """Checksum of the corpora."""
    resumed_from: str = ""
    """The checkpoint that this process resumed from; empty for a new run."""
    parent: str = ""
    """The checkpoint or model that this run was initialised from, with --init_from also the weights' checksum."""
    total_tokens: int = 0
    """Tokens of all steps, batch-size warm-up included."""
    changes: list[str] = field(default_factory=list)
    """Config changes since the last start."""
    optimizer: str = ""
    """The parameter groups, in one line."""
    layout: str = ""
    """Which other software can load the model, or what prevents it."""
    active_parameters: int = 0
    """Parameters used per token, if not all of them (mixture of experts)."""
    flops_per_token: float = 0.0
    """FLOPs per trained token at full context length, forward and backward."""
    plugins: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the code of the plug-ins' parts that the run uses, by kind and name."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device in the run's precision; None if unknown."""
    config: dict[str, str] = field(default_factory=dict)
    """Every option of the run as text, by its name."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parameter counts of the parts of the model that have any."""
    strategy: str = ""
    """How several ranks share the model: ddp, zero1, fsdp or hsdp; empty for one rank."""


@dataclass(frozen=True)
class StepLogged(Event):
    """Metrics of one optimizer step."""

    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_left: float
    data_wait: float = 0.0
    """Fraction of the time spent waiting for data."""
    skipped: int = 0
    """Updates skipped so far because the loss or gradient was not finite."""
    seconds: float = 0.0
    """Time of the steps since the last logged one."""
    steps: int = 1
    """How many they are."""
    by_corpus: dict[str, float] = field(default_factory=dict)
    """Mean loss per corpus, by its URI, if there are several."""
    experts: dict[str, float] = field(default_factory=dict)
    """Load of the busiest and the idlest expert relative to an even share; mixture of experts only."""
    memory_gb: float = 0.0
    """Peak device memory so far; 0 if not measured."""
    objective: float | None = None
    """The training objective, if it has auxiliary losses too."""
    tflops: float = 0.0
    """Model TFLOP/s per device."""
    mfu: float | None = None
    """Model FLOPs utilisation: `tflops` as a fraction of the device's peak; None if that is unknown."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Means since the last logged step, by NVML and the host: gpu_utilization (0 to 1), gpu_memory_gb, gpu_power_watts,
    gpu_temperature_celsius, gpu_throttled_thermal and gpu_throttled_power (0 to 1), host_memory_gb (this process),
    host_memory_used (0 to 1). What was not measured is absent."""


@dataclass(frozen=True)
class EvalDone(Event):
    """The validation loss was computed."""

    val_loss: float
    tokens: int
    seconds: float
    by_corpus: dict[str, float] = field(default_factory=dict)
    """Mean loss per corpus, by its URI, if there are several."""
    ema_loss: float | None = None
    """Validation loss of the EMA weights, if there are any."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))


@dataclass(frozen=True)
class ScoresDone(Event):
    """Evaluators scored the model."""

    scores: dict[str, float]
    """By name: that of the evaluator, or EVALUATOR/METRIC where it has several."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SampleDrawn(Event):
    """A sample was generated from a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class HistogramsTaken(Event):
    """Weights after a step, and its gradients before clipping, counted in the buckets of runs/histogram_buckets.py.

    For trackers only: events.jsonl leaves it out, since one is as long as hundreds of steps.
    """

    weights: dict[str, list[int]]
    """Counts per bucket, by the name of the parameter."""
    gradients: dict[str, list[int]]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    path: str
    size_bytes: int
    seconds: float
    """From the start of the save until it was durable; training was blocked for `stalled_seconds` of it."""
    stalled_seconds: float = 0.0
    tiers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class UpdateSkipped(Event):
    """The loss or gradient was not finite; the model was not updated."""

    loss: float
    grad_norm: float
    windows: list[int]
    """The step's data: first window, and end (exclusive)."""


@dataclass(frozen=True)
class RolledBack(Event):
    """The run rolled back to `step` and skips `windows` from now on."""

    from_step: int
    reason: str
    loss: float
    grad_norm: float
    windows: list[int]


@dataclass(frozen=True)
class Warned(Event):
    """Something that the user should know, while the run continues."""

    about: str
    """disk, save, copy (mirror), guard (loss spike), checkpoint, hang, plan, schedule, tasks or validation; of the
    monitor: grad_norm, plateau, nan, not_learning, overfitting, throughput, straggler, data_wait, evaluation, mfu,
    memory or gpu."""
    message: str


@dataclass(frozen=True)
class LastStepMoved(Event):
    """The run will end after another step than it was to, so that it ends inside its time budget."""

    max_steps: int


@dataclass(frozen=True)
class RunFinished(Event):
    """The process ended by itself: at the last step, or because it was asked to stop."""

    reason: str
    seconds: float


@dataclass(frozen=True)
class RunCrashed(Event):
    """A process ended without recording it; detected by the supervisor, or at the next start."""

    reason: str


EVALUATIONS = (EvalDone, ScoresDone, SampleDrawn)

EVENTS = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        StepLogged,
        EvalDone,
        ScoresDone,
        SampleDrawn,
        CheckpointSaved,
        UpdateSkipped,
        RolledBack,
        Warned,
        LastStepMoved,
        RunFinished,
        RunCrashed,
    )
}


def to_json(event: Event) -> str:
    """Returns the event as a line of events.jsonl."""
    record: dict[str, Any] = {"event": type(event).__name__, **vars(event)}
    if isinstance(event, EvalDone):
        record["perplexity"] = event.perplexity
    return json.dumps(replace_non_finite(record), ensure_ascii=False)


def from_json(line: str) -> Event | None:
    """Returns the event of a line, ignoring fields that a newer gptmill added; None for an event that it added.

    Raises ValueError, KeyError, TypeError or OverflowError for what gptmill cannot have written.
    """
    record: dict[str, Any] = parse_json(line)
    kind = EVENTS.get(record["event"])
    if kind is None:
        return None
    known = [item for item in fields(kind) if item.name in record]
    event = kind(**{item.name: READERS[str(item.type)](record[item.name]) for item in known})
    if event.step < 0 or not 0 <= event.time < MAX_TIME:
        raise ValueError("its step or time is impossible")
    return event


def replace_non_finite(value: Any) -> Any:
    """Returns the value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_float(value: Any) -> float:
    """Returns the number; NaN for a null, which stands for one that is not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not an integer")
    if not -MAX_INT <= value <= MAX_INT:
        raise OverflowError("more than 64 bits")
    return value


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _read_list(read_item: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return [read_item(item) for item in value]


def _read_dict(read_item: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return {name: read_item(item) for name, item in value.items()}


# By the type of a field. A line may come from another version, a damaged disk or an editor.
READERS: dict[str, Callable[[Any], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "float | None": lambda value: None if value is None else _read_float(value),
    "str": _read_str,
    "list[int]": partial(_read_list, _read_int),
    "list[str]": partial(_read_list, _read_str),
    "dict[str, float]": partial(_read_dict, _read_float),
    "dict[str, str]": partial(_read_dict, _read_str),
}
