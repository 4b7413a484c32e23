"""What was measured, as lines to be read. Knows no machine and no files."""

from __future__ import annotations

from gptmill.experiments.bench.ablations import ALL_KEY, BF16_KEY, NAIVE_KEY
from gptmill.experiments.bench.measurement import Measurement, Result
from gptmill.runs.trackers.console import format_rate

HEADER = ("", "tokens/s", "speed", "memory GB", "memory", "MFU")
UNKNOWN = "-"
NOISY_SPREAD = 0.1


def make_table(results: list[Result]) -> list[str]:
    """A line for each row, compared with the one that it names, under a heading for each kind of comparison."""
    measured = {result.row.key: result.measurement for result in results}
    width = max([len(HEADER[0]), *(len(result.row.title) + 2 for result in results)])
    lines = [_join(width, HEADER)]
    heading = ""
    for result in results:
        row = result.row
        if (wanted := _find_heading(row.key, row.base)) != heading:
            heading = wanted
            lines += [heading] if heading else []
        title = f"  {row.title}" if heading else row.title
        if result.measurement is None:
            lines.append(f"{title:<{width}}  {result.problem}")
        else:
            lines.append(_join(width, (title, *_make_cells(result.measurement, measured.get(row.base)))))
    return lines + warn_of_noise([result.measurement for result in results if result.measurement is not None])


def warn_of_noise(measurements: list[Measurement]) -> list[str]:
    """A line where steps that do the same took different times, so that small differences mean nothing."""
    widest = max((measurement.spread for measurement in measurements), default=0.0)
    if widest <= NOISY_SPREAD:
        return []
    return [
        f"the middle half of a row's steps differs by up to {widest:.0%}: is this machine busy with something else?"
    ]


def describe_measurement(measurement: Measurement, steps: int, warm_up: int) -> list[str]:
    """All that is known of one measurement, a line for each thing."""
    is_compiled = "compiled" in measurement.precision
    cache = ", compiled anew" if measurement.compiled_anew else ", compiled graphs found in the cache"
    speed = f"median of {steps:,} steps of {measurement.tokens_per_step:,} tokens, after {warm_up:,} to warm up"
    lines = {
        "tokens/s": f"{measurement.tokens_per_second:,.0f} ({speed})",
        "step": f"{measurement.step_seconds * 1e3:,.1f} ms",
        "MFU": _describe_mfu(measurement),
        "peak memory": f"{measurement.memory_gb:.2f} GB",
        "start to first step": f"{measurement.first_step_seconds:.1f} s{cache if is_compiled else ''}",
        "waiting for data": f"{measurement.data_wait:.2%} of the time",
        "clocks": describe_clocks(measurement.clocks),
    }
    return [f"{name:<22}{text}" for name, text in lines.items() if text] + warn_of_noise([measurement])


def describe_clocks(clocks: dict[str, float]) -> str:
    """Empty where nothing is known."""
    shown = {
        "sm_mhz": "{:,.0f} MHz",
        "max_sm_mhz": "of at most {:,.0f}",
        "memory_mhz": "memory {:,.0f} MHz",
        "watts": "{:,.0f} W",
        "celsius": "{:,.0f} °C",
    }
    return ", ".join(text.format(clocks[name]) for name, text in shown.items() if name in clocks)


def _find_heading(key: str, base: str) -> str:
    if key == ALL_KEY or not base:
        return ""
    return {
        NAIVE_KEY: "each alone, against naive",
        BF16_KEY: "with mixed precision, against that alone",
        ALL_KEY: "one less or one more, against all together",
    }[base]


def _make_cells(measurement: Measurement, base: Measurement | None) -> tuple[str, ...]:
    speed = memory = UNKNOWN
    if base is not None:
        speed = f"{measurement.tokens_per_second / base.tokens_per_second:.2f}x"
        if base.memory_gb:
            change = round(measurement.memory_gb / base.memory_gb - 1, 2)
            memory = f"{change or 0.0:+.0%}"  # no minus in front of nothing
    mfu = UNKNOWN if measurement.mfu is None else f"{measurement.mfu:.1%}"
    held = f"{measurement.memory_gb:.2f}" if measurement.memory_gb else UNKNOWN
    return f"{measurement.tokens_per_second:,.0f}", speed, held, memory, mfu


def _join(width: int, cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<{width}}" + "".join(f"{cell:>12}" for cell in cells[1:])


def _describe_mfu(measurement: Measurement) -> str:
    rate = "" if measurement.tflops is None else format_rate(measurement.tflops)
    if measurement.mfu is None:
        return f"unknown for this device{f' ({rate})' if rate else ''}"
    return f"{measurement.mfu:.1%}{f' ({rate})' if rate else ''}"
