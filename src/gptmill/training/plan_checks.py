"""Checks of a planned run: what is far from what such runs usually are, each in a sentence with numbers and a fix.

Pure: everything that is checked is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gptmill.config.hardware import GIB, USABLE_SHARE
from gptmill.config.optimizer import Lion, Muon
from gptmill.config.run import RunConfig
from gptmill.training.memory_estimate import estimate_run_memory
from gptmill.training.plan import TrainPlan
from gptmill.training.run_counts import RunCounts
from gptmill.training.schedule_warnings import find_schedule_warnings
from gptmill.training.time_estimate import TimeEstimate, interpolate

MAX_EPOCHS = 4.0  # up to here repeated text is worth almost as much as new text (Muennighoff 2023, arXiv:2305.16264)
USELESS_EPOCHS = 40.0  # and from here on worth nothing (the same)
EPOCH_TOLERANCE = 0.2  # between steps_per_epoch and one pass over the corpus
MAX_WARMUP_SHARE = 0.2
MIN_TOKENS_PER_PARAMETER = 1.0
CHINCHILLA = 20  # tokens per parameter (Hoffmann 2022, arXiv:2203.15556)
LONG_CONTEXT = 2.0  # context over median document from which most of a window is other documents
MAX_EVALUATION_SHARE = 0.15
MAX_CHECKPOINT_SHARE = 0.05
# Peak learning rates of GPT-3 with AdamW by parameters (Brown 2020, arXiv:2005.14165, table 2.1), continued to small
# models by nanoGPT's 1e-3 at 11M.
USUAL_LR = {
    1e6: 2.5e-3, 11e6: 1e-3, 125e6: 6e-4, 350e6: 3e-4, 760e6: 2.5e-4, 1.3e9: 2e-4, 2.7e9: 1.6e-4, 6.7e9: 1.2e-4,
    13e9: 1e-4, 175e9: 0.6e-4,
}  # fmt: skip
LR_FACTOR = 5.0  # published runs lie within it: Llama 7B took 2.5 times GPT-3's, GPT-2 124M on FineWeb up to 3 times
LION_FACTOR = 0.2  # Lion's rate is 3 to 10 times lower (Chen 2023, arXiv:2302.06675)
MUON_BAND = (0.002, 0.1)  # around the 0.02 of Jordan 2024


@dataclass(frozen=True)
class PlanWarning:
    """Something that the user should know before paying."""

    about: str
    message: str


@dataclass(frozen=True)
class PlannedRun:
    """All that is checked; what is unknown is None, and not checked."""

    config: RunConfig
    plan: TrainPlan
    corpus_name: str = ""
    corpus_tokens: int | None = None
    median_document_tokens: int | None = None
    device_name: str = ""
    device_memory_bytes: int | None = None
    needed_memory_bytes: int | None = None
    has_kernels: bool = False
    free_disk_bytes: int | None = None
    counts: RunCounts | None = None
    time: TimeEstimate | None = None


def find_plan_warnings(run: PlannedRun) -> list[PlanWarning]:
    """Every warning, the most expensive mistakes first."""
    checks: dict[str, Callable[[PlannedRun], str]] = {
        "memory": _check_memory,
        "disk": _check_disk,
        "batch": _check_batch,
        "epochs": _check_epochs,
        "steps_per_epoch": _check_steps_per_epoch,
        "schedule": _check_warmup,
        "learning_rate": _check_learning_rate,
        "documents": _check_documents,
        "tokens": _check_tokens,
        "evaluation": _check_evaluations,
        "checkpoints": _check_saves,
    }
    found = [PlanWarning(about, check(run)) for about, check in checks.items()]
    return [warning for warning in found if warning.message]


def find_usual_lr(parameters: float) -> float:
    """The usual peak learning rate of AdamW, interpolated between published sizes."""
    return interpolate(USUAL_LR, parameters)


def _check_memory(run: PlannedRun) -> str:
    needed, has = run.needed_memory_bytes, run.device_memory_bytes
    if needed is None or has is None or needed <= USABLE_SHARE * has:
        return ""
    return (
        f"training needs about {needed / GIB:,.1f} GiB, but {run.device_name} has {has / GIB:,.1f} GiB, of which "
        f"{USABLE_SHARE:.0%} are usable; {_find_fitting(run, USABLE_SHARE * has)}"
    )


def _find_fitting(run: PlannedRun, usable_bytes: float) -> str:
    """The flags with which it would fit, by estimate."""
    config, rows = run.config, run.config.training.mini_batch_size
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0]
    needs = [
        estimate_run_memory(
            config, run.plan.padded_vocab_size, size, run.plan.precision, has_kernels=run.has_kernels
        ).total
        for size in sizes
    ]
    extra = (run.needed_memory_bytes or 0) - needs[0]  # what does not depend on the micro-batch
    for size, need in zip(sizes, needs, strict=True):
        if need + extra <= usable_bytes:
            return f"--mini_batch_size {size} would fit (total_batch_size stays as it is)"
    return "not even --mini_batch_size 1 would; use --gradient_checkpointing full or a smaller model"


def _check_disk(run: PlannedRun) -> str:
    free, counts = run.free_disk_bytes, run.counts
    if free is None or counts is None or counts.checkpoints_bytes + counts.log_bytes <= free:
        return ""
    fitting = max(0, (free - counts.log_bytes) // max(1, counts.checkpoint_bytes))
    return (
        f"{counts.kept_checkpoints} checkpoints of {counts.checkpoint_bytes / 1e9:,.2f} GB and the logs take "
        f"{(counts.checkpoints_bytes + counts.log_bytes) / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free in "
        f"{run.config.tracking.logdir}, enough for {fitting:,}; lower --keep_checkpoints, or choose another --logdir"
    )


def _check_batch(run: PlannedRun) -> str:
    tokens, batch = run.corpus_tokens, run.plan.tokens_per_step
    if tokens is None or batch <= tokens:
        return ""
    return (
        f"one step of {batch:,} tokens is more than the whole corpus of {tokens:,}; use more text or a smaller "
        f"--total_batch_size"
    )


def _check_epochs(run: PlannedRun) -> str:
    tokens, plan = run.corpus_tokens, run.plan
    if tokens is None:
        return ""
    epochs = plan.count_tokens() / tokens
    if epochs <= MAX_EPOCHS:
        return ""
    worth = "adds nothing" if epochs > USELESS_EPOCHS else f"is worth less and less after {MAX_EPOCHS:.0f} epochs"
    steps = max(1, int(MAX_EPOCHS * tokens / plan.tokens_per_step))
    return (
        f"{plan.max_steps:,} steps of {plan.tokens_per_step:,} tokens are {format_count(plan.count_tokens())} tokens, "
        f"{epochs:,.1f} epochs of the {format_count(tokens)} in {run.corpus_name}; repeated text {worth} (Muennighoff "
        f"2023): use more text, or --max_steps {steps} for {MAX_EPOCHS:.0f} epochs"
    )


def _check_steps_per_epoch(run: PlannedRun) -> str:
    tokens, given, plan = run.corpus_tokens, run.config.training.steps_per_epoch, run.plan
    if tokens is None or given is None or run.config.training.max_steps is not None:
        return ""
    actual = tokens / plan.tokens_per_step
    if abs(given / actual - 1) <= EPOCH_TOLERANCE:
        return ""
    return (
        f"steps_per_epoch {given:,} makes an epoch of {format_count(given * plan.tokens_per_step)} tokens, but "
        f"{run.corpus_name} has {format_count(tokens)}, {actual:,.0f} steps; leave --steps_per_epoch out to pass over "
        f"the corpus once"
    )


def _check_warmup(run: PlannedRun) -> str:
    optimizer, steps = run.config.optimizer, run.plan.max_steps
    if found := find_schedule_warnings(optimizer, steps):
        return found[0]
    share = optimizer.warmup_steps / steps
    if share <= MAX_WARMUP_SHARE:
        return ""
    return (
        f"warmup_steps {optimizer.warmup_steps:,} are {share:.0%} of the {steps:,} steps; runs usually warm up for 1 "
        f"to 10 %: --warmup_steps {max(1, steps // 20)}"
    )


def _check_learning_rate(run: PlannedRun) -> str:
    optimizer, config = run.config.optimizer.optimizer, run.config.optimizer
    if isinstance(optimizer, Muon):
        low, high = MUON_BAND
        if low <= optimizer.matrix_lr <= high:
            return ""
        return f"matrix_lr {optimizer.matrix_lr:g} is outside of Muon's usual band, {low:g} to {high:g}; 0.02 is common"
    usual = find_usual_lr(run.plan.active_parameters or run.plan.parameters)
    usual *= LION_FACTOR if isinstance(optimizer, Lion) else 1.0
    low, high = usual / LR_FACTOR, usual * LR_FACTOR
    is_continued = run.config.training.init_from is not None  # such runs take lower rates
    if config.max_lr <= high and (config.max_lr >= low or is_continued):
        return ""
    return (
        f"max_lr {config.max_lr:g} is outside of the usual band of {optimizer.tag} for "
        f"{format_count(run.plan.parameters)} parameters, {low:.1g} to {high:.1g}; --max_lr {usual:.1g} is common"
    )


def _check_documents(run: PlannedRun) -> str:
    median, context = run.median_document_tokens, run.config.model.context_length
    if median is None or run.config.data.documents != "packed" or context < LONG_CONTEXT * median:
        return ""
    return (
        f"a window of {context:,} tokens spans about {context / max(1, median):,.0f} documents (their median has "
        f"{median:,} tokens), which attend to each other; --documents masked keeps them apart, or use a shorter "
        f"--context_length"
    )


def _check_tokens(run: PlannedRun) -> str:
    tokens, parameters = run.plan.count_tokens(), run.plan.active_parameters or run.plan.parameters
    if tokens / parameters >= MIN_TOKENS_PER_PARAMETER:
        return ""
    return (
        f"{format_count(tokens)} tokens for {format_count(parameters)} parameters are {tokens / parameters:.2g} per "
        f"parameter, where {CHINCHILLA} are optimal (Hoffmann 2022); a smaller model reaches a lower loss in this time"
    )


def _check_evaluations(run: PlannedRun) -> str:
    if run.time is None or run.counts is None:
        return ""
    share, freq = run.time.evaluation / run.time.total, run.config.evaluation.eval_freq
    if share <= MAX_EVALUATION_SHARE or run.counts.evaluations <= 2:
        return ""
    return (
        f"{run.counts.evaluations:,} evaluations take {share:.0%} of the time; --eval_freq "
        f"{freq * math.ceil(share / 0.05)}, or fewer --eval_tokens or --sample_tokens, make it about 5 %"
    )


def _check_saves(run: PlannedRun) -> str:
    if run.time is None or run.counts is None:
        return ""
    share, freq = run.time.checkpoints / run.time.total, run.config.checkpoints.checkpoint_freq
    if share <= MAX_CHECKPOINT_SHARE:
        return ""
    return (
        f"{run.counts.saves:,} checkpoints take {share:.0%} of the time; --checkpoint_freq "
        f"{freq * math.ceil(share / 0.01)} makes it about 1 %"
    )


def format_count(number: float) -> str:
    """A count with a unit: 104.9 B, 12.8 B, 303.2 M, 1,536."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f}"
