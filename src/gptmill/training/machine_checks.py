"""Monitoring checks of the machine: throughput, waiting for data, memory, and the GPU's health."""

from __future__ import annotations

from collections import deque
from statistics import median

from gptmill.runs.events import EvalDone, StepLogged
from gptmill.training.alarm import Alarm, Recent, Settling, Usual
from gptmill.training.learning_checks import Check

GIGA = 1e9
# How far back behind its limit a quantity must be to count as fine again.
FINE_SPEED = 1.2
FINE_WAIT = 0.5
FINE_MEMORY = 0.97
FINE_CELSIUS = 3.0
FINE_THROTTLING = 0.2
FINE_UTILIZATION = 1.1
FINE_MFU = 1.2
SLOW_SECONDS = 60.0  # shorter dips come from neighbours and checkpoints, and cost nothing worth a warning
USUAL_EVALUATIONS = 8
MIN_EVALUATIONS = 3
MIN_DELAY_SECONDS = 1.0  # above the usual time
BUSY = 0.9  # of the time
IDLE_REST = 0.1  # of the time: what else idles a GPU that waits for data


class ThroughputCheck(Check):
    """Whether training has become slower than it was."""

    about = "throughput"

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._recent, self._usual, self._alarm = Recent(min_seconds=SLOW_SECONDS), Usual(), Alarm()

    def reset(self) -> None:
        self._recent.clear()
        self._usual.clear()

    def see_step(self, event: StepLogged) -> str:
        gone, usual = self._recent.add(event.tokens_per_second, event.seconds), self._usual.level
        now = self._recent.find_median()
        is_low = usual is not None and now < self._fraction * usual
        if not is_low:  # else the steps that leave are slow ones too, and not what is usual
            self._usual.add(gone)
        if usual is None or not self._recent.is_full:
            return ""
        is_fine = now > min(1.0, FINE_SPEED * self._fraction) * usual
        if not self._alarm.check(is_bad=is_low, is_fine=is_fine, time=event.time):
            return ""
        return (
            f"throughput has been {now:,.0f} tokens/s for {self._recent.seconds:.0f} s, {now / usual:.0%} of its "
            f"usual {usual:,.0f}{_describe_machine(event)}; look for other programs on this machine, "
            f"slow storage and a hot GPU"
        )


class EvaluationTimeCheck(Check):
    """Whether evaluations take longer than they did; two in a row, since a neighbour may slow one down."""

    about = "eval_time"

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._usual: deque[float] = deque(maxlen=USUAL_EVALUATIONS)
        self._slow_in_a_row = 0
        self._alarm = Alarm()

    def reset(self) -> None:
        self._usual.clear()
        self._slow_in_a_row = 0

    def see_eval(self, event: EvalDone) -> str:
        usual = median(self._usual) if len(self._usual) >= MIN_EVALUATIONS else None
        is_slow = usual is not None and event.seconds > max(self._factor * usual, usual + MIN_DELAY_SECONDS)
        self._slow_in_a_row = self._slow_in_a_row + 1 if is_slow else 0
        if not is_slow:
            self._usual.append(event.seconds)
        is_bad = self._slow_in_a_row >= 2
        if usual is None or not self._alarm.check(is_bad=is_bad, is_fine=not is_slow, time=event.time):
            return ""
        return (
            f"the evaluation took {event.seconds:.1f} s, {event.seconds / max(usual, 1e-9):.1f} times its usual "
            f"{usual:.1f} s; look for other programs on this machine, slow storage and a hot GPU"
        )


class DataWaitCheck(Check):
    """Whether training waits for its data."""

    about = "data_wait"

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._recent, self._alarm = Recent(), Alarm()

    def reset(self) -> None:
        self._recent.clear()

    def see_step(self, event: StepLogged) -> str:
        self._recent.add(event.data_wait, event.seconds)
        if not self._recent.is_full:
            return ""
        waited = self._recent.average()
        is_fine = waited < FINE_WAIT * self._fraction
        if not self._alarm.check(is_bad=waited > self._fraction, is_fine=is_fine, time=event.time):
            return ""
        return (
            f"{waited:.0%} of the last {self._recent.seconds:.0f} s went into waiting for data; put the shards on a "
            f"faster local disk, raise --prefetch_batches, or use --data_on_device if they fit"
        )


class MemoryCheck(Check):
    """Whether the memory of the GPU or of the host is nearly full."""

    about = "memory"

    def __init__(self, fraction: float, device_bytes: int | None) -> None:
        self._fraction = fraction
        self._device_gb = None if device_bytes is None else device_bytes / GIGA
        self._device_alarm, self._host_alarm = Alarm(), Alarm()

    def see_step(self, event: StepLogged) -> str:
        return self._see_device(event) or self._see_host(event)

    def _see_device(self, event: StepLogged) -> str:
        if not self._device_gb or not event.memory_gb:
            return ""
        if not self._sounds(self._device_alarm, event.memory_gb / self._device_gb, event.time):
            return ""
        return (
            f"tensors have taken up to {event.memory_gb:.1f} of the GPU's {self._device_gb:.1f} GB, so that a little "
            f"more ends the run; lower --mini_batch_size, or add --gradient_checkpointing selective"
        )

    def _see_host(self, event: StepLogged) -> str:
        used = event.telemetry.get("host_memory_used", 0.0)
        if not self._sounds(self._host_alarm, used, event.time):
            return ""
        own = event.telemetry.get("host_memory_gb")
        share = "" if own is None else f" ({own:.1f} GB by this process)"
        return (
            f"{used:.0%} of the host's memory is in use{share}, and the system kills what needs more; end other "
            f"programs, lower --prefetch_batches, or ask for more memory"
        )

    def _sounds(self, alarm: Alarm, used: float, time: float) -> bool:
        return alarm.check(is_bad=used > self._fraction, is_fine=used < FINE_MEMORY * self._fraction, time=time)


class TemperatureCheck(Check):
    """Whether a GPU stays hot."""

    about = "gpu"

    def __init__(self, celsius: float) -> None:
        self._celsius = celsius
        self._recent, self._alarm = Recent(), Alarm()

    def reset(self) -> None:
        self._recent.clear()

    def see_step(self, event: StepLogged) -> str:
        if "gpu_temperature_celsius" not in event.telemetry:
            return ""
        self._recent.add(event.telemetry["gpu_temperature_celsius"], event.seconds)
        now = self._recent.average()
        is_bad, is_fine = now >= self._celsius, now < self._celsius - FINE_CELSIUS
        if not self._recent.is_full or not self._alarm.check(is_bad=is_bad, is_fine=is_fine, time=event.time):
            return ""
        return (
            f"the GPU has been at {now:.0f} °C for {self._recent.seconds:.0f} s; a few degrees more slow it down: "
            f"check fans and air flow, or lower its power limit (nvidia-smi -pl)"
        )


class ThrottlingCheck(Check):
    """Whether heat or the power supply slows a GPU down."""

    about = "gpu"

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._causes = {
            "gpu_throttled_thermal": (Recent(), Alarm(), "heat", "check fans and air flow"),
            "gpu_throttled_power": (Recent(), Alarm(), "its power supply", "check its cables and the power supply"),
        }

    def reset(self) -> None:
        for recent, *_ in self._causes.values():
            recent.clear()

    def see_step(self, event: StepLogged) -> str:
        for name, (recent, alarm, cause, advice) in self._causes.items():
            if name not in event.telemetry:
                continue
            recent.add(event.telemetry[name], event.seconds)
            now = recent.average()
            is_bad, is_fine = now > self._fraction, now < FINE_THROTTLING * self._fraction
            if recent.is_full and alarm.check(is_bad=is_bad, is_fine=is_fine, time=event.time):
                return (
                    f"{cause} slowed the GPU down for {now:.0%} of the last {recent.seconds:.0f} s"
                    f"{_describe_machine(event)}; {advice}, or lower its power limit (nvidia-smi -pl)"
                )
        return ""


class UtilizationCheck(Check):
    """Whether a GPU idles while it should train: it waits for data, or for the host, which launches its kernels."""

    about = "gpu"

    def __init__(self, fraction: float, remedies: str = "let gptmill tune find the fastest settings") -> None:
        self._fraction, self._remedies = fraction, remedies
        self._recent, self._alarm, self._settling = Recent(), Alarm(), Settling()

    def reset(self) -> None:
        self._recent.clear()

    def see_pause(self, time: float) -> str:
        self._settling.note_pause(time)
        return ""

    def see_step(self, event: StepLogged) -> str:
        if self._settling.includes(event.time) or "gpu_utilization" not in event.telemetry:
            return ""
        self._recent.add(event.telemetry["gpu_utilization"], event.seconds)
        now = self._recent.average()
        is_bad, is_fine = now < self._fraction, now > min(1.0, FINE_UTILIZATION * self._fraction)
        if not self._recent.is_full or not self._alarm.check(is_bad=is_bad, is_fine=is_fine, time=event.time):
            return ""
        busy = f"the GPU was busy for only {now:.0%} of the last {self._recent.seconds:.0f} s of training"
        if event.data_wait > 1 - now - IDLE_REST:
            return (
                f"{busy}, and waited for data for {event.data_wait:.0%} of the last step: put the shards on a faster "
                f"local disk (SSD), raise --prefetch_batches, or use --data_on_device"
            )
        return f"{busy}, because the host does not launch its kernels fast enough: {self._remedies}"


class MfuCheck(Check):
    """Whether a GPU computes far below its peak although it is busy."""

    about = "mfu"

    def __init__(self, fraction: float, remedies: str) -> None:
        self._fraction, self._remedies = fraction, remedies
        self._recent, self._alarm = Recent(), Alarm()

    def reset(self) -> None:
        self._recent.clear()

    def see_step(self, event: StepLogged) -> str:
        if event.mfu is None or "gpu_utilization" not in event.telemetry:
            return ""
        self._recent.add(event.mfu, event.seconds)
        now, is_busy = self._recent.average(), event.telemetry["gpu_utilization"] >= BUSY
        is_fine = now > FINE_MFU * self._fraction
        if not self._recent.is_full or not self._alarm.check(
            is_bad=now < self._fraction and is_busy, is_fine=is_fine, time=event.time
        ):
            return ""
        return (
            f"the GPU is busy but reaches {now:.1%} of its peak FLOP/s ({event.tokens_per_second:,.0f} tokens/s): "
            f"its kernels are small or slow: {self._remedies}"
        )


def _describe_machine(event: StepLogged) -> str:
    """What may explain a slow step, in parentheses."""
    found = event.telemetry
    parts = [
        f"GPU {found['gpu_temperature_celsius']:.0f} °C" if "gpu_temperature_celsius" in found else "",
        f"{found['gpu_power_watts']:.0f} W" if "gpu_power_watts" in found else "",
        f"{event.data_wait:.0%} waiting for data" if event.data_wait >= 0.01 else "",
    ]
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""
