"""What an event adds to the charts of a tracker: the same names in TensorBoard, Weights & Biases and Trackio."""

from __future__ import annotations

from gptmill.runs.events import (
    EvalDone,
    Event,
    HistogramsTaken,
    RolledBack,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
    Warned,
)

FINAL_METRICS = ("loss/train", "loss/val", "perplexity/val", "speed/tokens_per_second", "speed/mfu")
"""What compares runs at a glance."""


def list_scalars(event: Event) -> dict[str, float]:
    """Returns the values that an event adds to charts, by name."""
    if isinstance(event, StepLogged):
        return _list_step_scalars(event)
    if isinstance(event, EvalDone):
        scalars = {"loss/val": event.val_loss, "perplexity/val": event.perplexity, "speed/eval_seconds": event.seconds}
        if event.ema_loss is not None:
            scalars["loss/val_ema"] = event.ema_loss
        return {**scalars, **_name_by_corpus("loss/val", event.by_corpus)}
    if isinstance(event, TrainEvalDone):
        scalars = {"loss/train_eval": event.train_loss, "perplexity/train_eval": event.perplexity}
        return {**scalars, **_name_by_corpus("loss/train_eval", event.by_corpus)}
    if isinstance(event, ScoresDone):
        return {f"evals/{name}": score for name, score in event.scores.items()}
    return {}


def list_histograms(event: HistogramsTaken) -> dict[str, list[int]]:
    """Returns the counts per bucket, by name."""
    weights = {f"weights/{name}": counts for name, counts in event.weights.items()}
    return {**weights, **{f"gradients/{name}": counts for name, counts in event.gradients.items()}}


def describe_incident(event: Event) -> str:
    """Returns the sentence of a warning or rollback; empty for other events."""
    if isinstance(event, Warned):
        return event.message
    if isinstance(event, RolledBack):
        return f"step {event.from_step:,}: {event.reason}: rolled back to step {event.step:,}"
    return ""


def _list_step_scalars(event: StepLogged) -> dict[str, float]:
    scalars = {
        "loss/train": event.loss,
        "perplexity/train": event.perplexity,
        "optimizer/lr": event.lr,
        "optimizer/grad_norm": event.grad_norm,
        "speed/tokens_per_second": event.tokens_per_second,
        "progress/epoch": event.epoch,
        **_name_by_corpus("loss/train", event.by_corpus),
        **{f"experts/{name}": load for name, load in event.experts.items()},
        **{f"machine/{name}": value for name, value in event.telemetry.items()},
    }
    if event.seconds:
        scalars["speed/step_seconds"] = event.step_seconds
        scalars["speed/data_wait"] = event.data_wait
    if event.samples_per_second:
        scalars["speed/samples_per_second"] = event.samples_per_second
    if event.objective is not None:
        scalars["loss/objective"] = event.objective
    if event.tflops:
        scalars["speed/tflops"] = event.tflops
    if event.mfu is not None:
        scalars["speed/mfu"] = event.mfu
    if event.memory_gb:
        scalars["memory/peak_gb"] = event.memory_gb
    if event.skipped:
        scalars["guard/skipped"] = event.skipped
    return scalars


def _name_by_corpus(name: str, losses: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{corpus.strip('/')}": loss for corpus, loss in losses.items()}
