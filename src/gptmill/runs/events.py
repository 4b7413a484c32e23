"""What happens in a run. Every tracker is fed the same events; readers of a run need events.jsonl alone.

Step n is the n-th optimizer update. An event of step n tells of the run after that update.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, fields
from typing import Any

from gptmill.runs.finite import replace_non_finite


@dataclass(frozen=True)
class Event:
    """Something that happened, and after how many steps."""

    step: int
    time: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True)
class RunStarted(Event):
    """A process began to train, at its first step or resumed."""

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
    """Fingerprint of gptmill's own source."""
    data: str = ""
    """Checksum of the corpora."""
    resumed_from: str = ""
    """The checkpoint that this process went on from; empty for a run that begins."""
    parent: str = ""
    """The checkpoint of another run that this run began from."""
    total_tokens: int = 0
    """Of all steps, whatever the batches of the first ones."""
    changes: list[str] = field(default_factory=list)
    """What is different in the config since the last start."""
    optimizer: str = ""
    """Its groups of parameters, in a line."""
    layout: str = ""
    """Which other software can load the model, or what prevents it."""
    active_parameters: int = 0
    """Those that one token meets, where that is not all of them."""
    flops_per_token: float = 0.0
    """Floating-point operations of a trained token in a window of full length, forward and backward."""
    peak_tflops: float | None = None
    """TFLOP/s that one device could reach in the run's number format; None where that is not known."""


@dataclass(frozen=True)
class StepLogged(Event):
    """One optimizer step, measured."""

    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_left: float
    data_wait: float = 0.0
    """Share of the time in which training waited for data."""
    skipped: int = 0
    """Updates skipped so far because they were not finite."""
    seconds: float = 0.0
    """Time that the steps since the last logged one took."""
    by_corpus: dict[str, float] = field(default_factory=dict)
    """Mean loss of each corpus by its address, where there are several."""
    experts: dict[str, float] = field(default_factory=dict)
    """Load of the busiest and the idlest expert, 1 for an even share; of a mixture of experts alone."""
    memory_gb: float = 0.0
    """The most that the device's memory has held so far; 0 where that is not measured."""
    objective: float | None = None
    """What is minimised, where that is not the loss alone."""
    tflops: float = 0.0
    """TFLOP/s of each device, by the count of what its tokens need."""
    mfu: float | None = None
    """Model FLOPs utilisation: `tflops` as a share of what the device could reach; None where that is not known."""


@dataclass(frozen=True)
class EvalDone(Event):
    """The validation split was scored."""

    val_loss: float
    tokens: int
    seconds: float
    by_corpus: dict[str, float] = field(default_factory=dict)
    """Mean loss of each corpus by its address, where there are several."""
    ema_loss: float | None = None
    """The same loss of the averaged weights, where they are kept."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))


@dataclass(frozen=True)
class SampleDrawn(Event):
    """The model continued a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on the disk."""

    path: str
    size_bytes: int
    seconds: float
    """From the start of the save until it was durable; training waited for `stalled_seconds` of it."""
    stalled_seconds: float = 0.0
    tiers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class UpdateSkipped(Event):
    """A loss or gradient that was not finite; the model stayed as it was."""

    loss: float
    grad_norm: float
    windows: list[int]
    """First window of the step's data, and the one after its last."""


@dataclass(frozen=True)
class RolledBack(Event):
    """The run went back to `step`, and will leave out `windows` from now on."""

    from_step: int
    reason: str
    loss: float
    grad_norm: float
    windows: list[int]


@dataclass(frozen=True)
class Warned(Event):
    """Something that the user should know of, while the run goes on."""

    about: str
    """disk, save, copy, guard, checkpoint or hang."""
    message: str


@dataclass(frozen=True)
class RunFinished(Event):
    """The process ended by itself: at its last step, or because it was asked to stop."""

    reason: str
    seconds: float


@dataclass(frozen=True)
class RunCrashed(Event):
    """A process ended without a word; found by the supervisor, or at the next start."""

    reason: str


EVENTS = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        StepLogged,
        EvalDone,
        SampleDrawn,
        CheckpointSaved,
        UpdateSkipped,
        RolledBack,
        Warned,
        RunFinished,
        RunCrashed,
    )
}


def to_json(event: Event) -> str:
    """One line of events.jsonl."""
    record: dict[str, Any] = {"event": type(event).__name__, **vars(event)}
    if isinstance(event, EvalDone):
        record["perplexity"] = event.perplexity
    return json.dumps(replace_non_finite(record), ensure_ascii=False)


def from_json(line: str) -> Event | None:
    """The event of a line, without fields that a newer gptmill added; None for an event that it added."""
    record: dict[str, Any] = json.loads(line)
    kind = EVENTS.get(record["event"])
    if kind is None:
        return None
    known = [item for item in fields(kind) if item.name in record]
    return kind(**{item.name: _restore_nan(record[item.name], str(item.type)) for item in known})


def _restore_nan(value: Any, hint: str) -> Any:
    """NaN where the line has null for want of it."""
    if hint == "dict[str, float]":
        return {key: _restore_nan(item, "float") for key, item in value.items()} if isinstance(value, dict) else {}
    return math.nan if value is None and hint == "float" else value
