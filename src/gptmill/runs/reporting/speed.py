"""How fast a run was, where its time went, and what bounds its speed, in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.runs.events import RunStarted
from gptmill.runs.goodput import Goodput, count
from gptmill.runs.reporting.formatting import format_amount, format_duration, format_percent
from gptmill.runs.reporting.record import RunRecord
from gptmill.runs.reporting.series import Series, compute_median

NOTABLE = 0.05  # a fraction of the time that is worth a sentence
GOOD_MFU = 0.4
BUSY_GPU = 0.9
SMALL_MODEL = 50e6  # parameters, below which the kernels of a large GPU are too short
SMALL_MICRO_BATCH = 8192  # tokens
STEADY = 0.7  # of the median speed


@dataclass(frozen=True)
class Speed:
    """What is None is not known. Shares are fractions of the time with a process running."""

    tokens_per_second: float | None
    """Median of the logged steps."""
    slow_tokens_per_second: float | None
    """What nine in ten steps reach."""
    mean_tokens_per_second: float | None
    """Tokens over the time of the steps."""
    samples_per_second: float | None
    """Mean; sequences of the context length."""
    step_seconds: float | None
    """Mean time of a step."""
    mfu: float | None
    data_wait: float
    """Fraction of the step time."""
    gpu_utilization: float | None
    running_seconds: float
    step_share: float
    evaluation_share: float
    checkpoint_share: float
    """Time that training was blocked by saves."""
    other_share: float
    """Startup, samples, and steps that were lost."""


def measure_speed(record: RunRecord, goodput: Goodput) -> Speed:
    running = goodput.running_seconds
    step, evaluation, checkpoint = (
        min(1.0, seconds / running) if running > 0 else 0.0
        for seconds in (record.step_seconds, record.evaluation_seconds, record.stalled_seconds)
    )
    speeds = record.curves["tokens_per_second"].groups
    ranked = sorted(group.mean for group in speeds)
    return Speed(
        compute_median(speeds) if speeds else None,
        ranked[len(ranked) // 10] if ranked else None,
        mean_tokens_per_second=record.tokens / record.step_seconds if record.step_seconds else None,
        samples_per_second=record.sequences / record.step_seconds if record.step_seconds and record.sequences else None,
        step_seconds=record.step_seconds / record.trained_steps if record.step_seconds else None,
        mfu=_find_median(record.curves["mfu"]),
        data_wait=record.waited_seconds / record.step_seconds if record.step_seconds else 0.0,
        gpu_utilization=_find_median(record.telemetry.get("gpu_utilization")),
        running_seconds=running,
        step_share=step,
        evaluation_share=evaluation,
        checkpoint_share=checkpoint,
        other_share=max(0.0, 1.0 - step - evaluation - checkpoint),
    )


def explain_speed(speed: Speed, goodput: Goodput, start: RunStarted | None) -> list[str]:
    """Returns sentences, the most important first."""
    if speed.tokens_per_second is None:
        return ["No step was logged, so there is no speed to explain."]
    sentences = [_name_bound(speed, start), _explain_mfu(speed, start), _explain_time(speed)]
    sentences.append(_explain_restarts(goodput))
    slow = speed.slow_tokens_per_second or 0.0
    if slow < STEADY * speed.tokens_per_second:
        sentences.append(
            f"The speed was not steady: one step in ten was slower than {format_amount(slow)} tokens/s, against a "
            f"median of {format_amount(speed.tokens_per_second)}; other processes on the machine are the usual cause."
        )
    return [sentence for sentence in sentences if sentence]


def _name_bound(speed: Speed, start: RunStarted | None) -> str:
    waited = format_percent(speed.data_wait)
    if speed.data_wait >= NOTABLE:
        return (
            f"Data bounds it: steps waited {waited} of their time for tokens. A larger --prefetch_batches, a local "
            "disk or --data_on_device shortens that."
        )
    if speed.step_share < 0.5:
        return (
            f"Overhead bounds it: only {format_percent(speed.step_share)} of the time went into training steps that "
            "were kept."
        )
    if speed.gpu_utilization is not None and speed.gpu_utilization < BUSY_GPU:
        return (
            f"The host bounds it: the GPU was busy {format_percent(speed.gpu_utilization)} of the time and waited for "
            "the CPU to launch its work. --compile or --cuda_graphs on shortens that."
        )
    kept = f"steps waited {waited} of their time for data, and took {format_percent(speed.step_share)} of all time"
    if speed.gpu_utilization is None and start is not None and not start.device.startswith("CPU"):
        return f"Neither data nor overhead bounds it: {kept}. How busy the GPU was is not recorded."
    return f"Compute bounds it: {kept}."


def _explain_mfu(speed: Speed, start: RunStarted | None) -> str:
    if speed.mfu is None:
        device = f" of {start.device}" if start else ""
        return f"The model FLOPs utilisation (MFU) is not known, since the peak rate{device} is not."
    share = f"MFU is {format_percent(speed.mfu)}"
    if speed.mfu >= GOOD_MFU:
        return f"{share} of the peak in this precision, which is good for a transformer."
    reasons = _list_reasons(start) if start else []
    return f"{share} of the peak in this precision" + (f", because {' and '.join(reasons)}." if reasons else ".")


def _list_reasons(start: RunStarted) -> list[str]:
    reasons = []
    if start.parameters < SMALL_MODEL:
        reasons.append(f"a model of {format_amount(start.parameters)} parameters has kernels too short to fill it")
    try:
        rows, columns = int(start.config["mini_batch_size"]), int(start.config["context_length"])
    except (KeyError, ValueError):
        return reasons
    if rows * columns < SMALL_MICRO_BATCH:
        reasons.append(f"a micro-batch has only {rows} × {columns:,} tokens")
    if start.config.get("compile") == "False" and "kernels" not in start.precision:
        reasons.append("the model is not compiled")
    return reasons


def _explain_time(speed: Speed) -> str:
    shares = [
        (speed.step_share, "training steps"),
        (speed.evaluation_share, "evaluations"),
        (speed.checkpoint_share, "waiting for checkpoints"),
        (speed.other_share, "startup, samples and steps that were lost"),
    ]
    listed = [f"{format_percent(share)} into {name}" for share, name in shares if share >= 0.001]
    return f"Of {format_duration(speed.running_seconds)} running time went {', '.join(listed)}." if listed else ""


def _explain_restarts(goodput: Goodput) -> str:
    if not goodput.restarts and not goodput.lost_steps:
        return ""
    counts = ((goodput.restarts, "restart"), (goodput.rollbacks, "rollback"))
    interruptions = " and ".join(count(number, noun) for number, noun in counts if number)
    lost = count(goodput.lost_steps, "step")
    return f"{interruptions} interrupted it, and {lost} had to be repeated."


def _find_median(series: Series | None) -> float | None:
    return compute_median(series.groups) if series is not None and series.groups else None
