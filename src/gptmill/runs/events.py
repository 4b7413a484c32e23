"""The events of a run. Every tracker receives the same events; events.jsonl is all that readers of a run need.

Step n is the n-th optimizer update. An event of step n describes the run after that update.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports NumPy, which most readers of events do not need
    from gptmill.runs.histogram_buckets import Counts

MAX_EXPONENT = 700.0  # beyond it, exp overflows


def make_perplexity(loss: float) -> float:
    """Returns exp(loss): between how many equally likely tokens the model hesitates."""
    return math.exp(min(loss, MAX_EXPONENT))


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
    grad_accum_steps: int = 0
    """Gradient accumulation: micro-batches of each rank per step."""
    device_memory_gb: float = 0.0
    """Memory of one device; 0 if not known."""


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
    samples_per_second: float = 0.0
    """Sequences of the context length of the step; 0 in logs of an older gptmill."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Means since the last logged step, by NVML and the host: gpu_utilization (0 to 1), gpu_memory_gb, gpu_power_watts,
    gpu_temperature_celsius, gpu_throttled_thermal and gpu_throttled_power (0 to 1), host_memory_gb (this process),
    host_memory_used (0 to 1), and on a CPU host_cpu_cores (of this process) and host_idle_cores. What was not measured
    is absent."""

    @property
    def perplexity(self) -> float:
        return make_perplexity(self.loss)

    @property
    def step_seconds(self) -> float:
        """Time of one step; 0 if not recorded."""
        return self.seconds / max(1, self.steps)


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
        return make_perplexity(self.val_loss)


@dataclass(frozen=True)
class TrainEvalDone(Event):
    """The loss on training windows was computed as the validation loss is: always the same ones, without dropout."""

    train_loss: float
    tokens: int
    seconds: float
    by_corpus: dict[str, float] = field(default_factory=dict)
    """Mean loss per corpus, by its URI, if there are several."""

    @property
    def perplexity(self) -> float:
        return make_perplexity(self.train_loss)


@dataclass(frozen=True)
class ScoresDone(Event):
    """Evaluators scored the model."""

    scores: dict[str, float]
    """By name: that of the evaluator, or EVALUATOR/METRIC where it has several."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SampleDrawn(Event):
    """Samples were generated from a prompt: `per_rank` by each rank, in one batch."""

    prompt: str
    text: str
    """The first sample of rank 0."""
    more_texts: list[str] = field(default_factory=list)
    """Its other samples, then those of the other ranks."""
    per_rank: int = 1

    @property
    def texts(self) -> dict[str, str]:
        """All samples by name, such as rank 0 sample 1."""
        texts, size = [self.text, *self.more_texts], max(1, self.per_rank)
        return {f"rank {number // size} sample {number % size}": text for number, text in enumerate(texts)}


@dataclass(frozen=True)
class HistogramsTaken(Event):
    """Weights after a step, and its gradients before clipping, counted in the buckets of runs/histogram_buckets.py.

    For trackers only: events.jsonl leaves it out, since one is as long as hundreds of steps.
    """

    weights: dict[str, Counts]
    """Counts per bucket, by the name of the parameter."""
    gradients: dict[str, Counts]


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
    """disk, save, logs, copy (mirror), guard (loss spike), checkpoint, hang, plan, schedule, tasks or validation; of
    the monitor: grad_norm, plateau, nan, not_learning, overfitting, throughput, eval_time, straggler, data_wait, mfu,
    memory, cpu or gpu."""
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


EVALUATIONS = (EvalDone, TrainEvalDone, ScoresDone, SampleDrawn)

EVENTS = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        StepLogged,
        EvalDone,
        TrainEvalDone,
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
