"""Events as lines of the console: steps, evaluations, samples, rollbacks and the end."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, NamedTuple

from gptmill.runs.display import can_hold, make_plain
from gptmill.runs.events import (
    EvalDone,
    RolledBack,
    RunFinished,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
)

MAX_SAMPLE_CHARS = 240  # of one sample; samples/ has them whole

LineKind = Literal["start", "step", "evaluation", "sample", "incident", "end"]


class Line(NamedTuple):
    """A line of the console."""

    text: str
    kind: LineKind
    num_faint: int = 0
    """Leading characters that a reader knows already: the prompt of a sample."""


def describe_step(event: StepLogged, val_loss: float | None, device_memory_gb: float = 0.0) -> str:
    parts = [*list_learning(event, val_loss), *list_speed(event, device_memory_gb)]
    return " | ".join([*parts, f"eta {format_seconds(event.seconds_left)}"])


def list_learning(event: StepLogged, val_loss: float | None) -> list[str]:
    """What a step says of the model."""
    parts = [
        f"epoch {event.epoch:.2f}",
        f"loss {event.loss:.4f}",
        f"ppl {_format_short(event.perplexity)}",
        f"val {val_loss:.4f}" if val_loss is not None else "",
        f"lr {event.lr:.2e}",
        f"norm {event.grad_norm:.3f}",
        f"busiest expert {event.experts['busiest']:.2f}x" if "busiest" in event.experts else "",
        f"skipped {event.skipped:,}" if event.skipped else "",
    ]
    return [part for part in parts if part]


def list_speed(event: StepLogged, device_memory_gb: float = 0.0) -> list[str]:
    """What a step says of the machine."""
    parts = [
        format_step_time(event.step_seconds) if event.step_seconds else "",
        f"{event.tokens_per_second:,.0f} tok/s",
        f"{format_count(event.samples_per_second)} samples/s" if event.samples_per_second else "",
        format_rate(event.tflops) if event.tflops else "",
        f"MFU {event.mfu:.1%}" if event.mfu is not None else "",
        _describe_memory(event.memory_gb, device_memory_gb),
        _describe_gpu(event.telemetry),
    ]
    return [part for part in parts if part]


def describe_eval(event: EvalDone) -> str:
    parts = [f"step {event.step:,}: val loss {event.val_loss:.4f}, perplexity {_format_long(event.perplexity)}"]
    parts += [f"{name} {loss:.4f}" for name, loss in event.by_corpus.items()]
    if event.ema_loss is not None:
        parts.append(f"EMA weights {event.ema_loss:.4f}")
    return " | ".join([*parts, f"{event.seconds:.1f} s"])


def describe_train_eval(event: TrainEvalDone) -> str:
    perplexity = _format_long(event.perplexity)
    parts = [f"step {event.step:,}: loss on training windows {event.train_loss:.4f}, perplexity {perplexity}"]
    parts += [f"{name} {loss:.4f}" for name, loss in event.by_corpus.items()]
    return " | ".join([*parts, f"{event.seconds:.1f} s"])


def describe_scores(event: ScoresDone) -> str:
    return f"step {event.step:,}: " + " | ".join(f"{name} {score:.4f}" for name, score in event.scores.items())


def describe_samples(event: SampleDrawn, encoding: str = "utf-8") -> list[Line]:
    """One line for each sample of rank 0, and where those of other ranks are."""
    shown, prompt = list(event.texts.items())[: event.per_rank], _join_lines(event.prompt, encoding)
    lines = []
    for name, text in shown:
        start = f"> {name}: {prompt}"
        whole = start + _join_lines(text, encoding)
        is_long = len(whole) - len(start) > MAX_SAMPLE_CHARS
        cut = whole[: len(start) + MAX_SAMPLE_CHARS] + "..." if is_long else whole
        lines.append(Line(cut, "sample", len(start)))
    if others := len(event.texts) - len(shown):
        text = f"> {others:,} more of other ranks in samples/step_{event.step:06d}.txt"
        lines.append(Line(text, "sample", len(text)))
    return lines


def describe_rollback(event: RolledBack) -> str:
    skipped = f"; windows {event.windows[0]:,} to {event.windows[1] - 1:,} are skipped" if event.windows else ""
    return f"step {event.from_step:,}: {event.reason}: rolled back to step {event.step:,}{skipped}"


def describe_end(event: RunFinished) -> str:
    how, _, why = event.reason.partition(": ")
    return f"{how} at step {event.step:,} after {format_seconds(event.seconds)}" + (f": {why}" if why else "")


def format_rate(tflops: float) -> str:
    if tflops >= 1:
        return f"{tflops:,.0f} TFLOP/s" if tflops >= 100 else f"{tflops:.1f} TFLOP/s"
    return f"{1000 * tflops:.3g} GFLOP/s"


def format_step_time(seconds: float) -> str:
    """Three digits: 81.5 ms, 1.23 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def format_count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _describe_memory(peak_gb: float, device_gb: float) -> str:
    if not peak_gb:
        return ""
    return f"{peak_gb:.1f} of {device_gb:.0f} GB ({peak_gb / device_gb:.0%})" if device_gb else f"{peak_gb:.1f} GB"


def _describe_gpu(telemetry: dict[str, float]) -> str:
    """Such as GPU 97% 612 W 61 °C; empty without a GPU that was measured."""
    formats = {"gpu_utilization": "{:.0%}", "gpu_power_watts": "{:.0f} W", "gpu_temperature_celsius": "{:.0f} °C"}
    found = [text.format(telemetry[name]) for name, text in formats.items() if name in telemetry]
    return " ".join(["GPU", *found]) if found else ""


def _join_lines(text: str, encoding: str) -> str:
    """The text on one line, with marks where lines end."""
    mark = "⏎" if can_hold("⏎", encoding) else " / "
    return make_plain(text, encoding).replace("\t", " ").replace("\n", mark)


def _format_short(perplexity: float) -> str:
    if perplexity < 100:
        return f"{perplexity:,.2f}"
    return f"{perplexity:,.0f}" if perplexity < 1e6 else f"{perplexity:.3g}"


def _format_long(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1e9 else f"{perplexity:.3g}"
