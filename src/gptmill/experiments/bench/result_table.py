"""Formats measurements as text. Knows no machine and no files."""

from __future__ import annotations

from gptmill.experiments.bench.ablations import ALL_KEY, BF16_KEY, NAIVE_KEY, PLAIN_KEY
from gptmill.experiments.bench.measurement import Measurement, RowResult
from gptmill.runs.trackers.event_lines import format_rate

HEADER = ("", "tokens/s", "speed", "memory GB", "memory", "MFU")
UNKNOWN = "-"
NOISY_SPREAD = 0.1


def make_table(results: list[RowResult]) -> list[str]:
    """Returns a line per row, compared with its baseline, under a heading per baseline."""
    measured = {result.row.key: result.measurement for result in results}
    width = max([len(HEADER[0]), *(len(result.row.title) + 2 for result in results)])
    lines = [_join(width, HEADER)]
    heading = ""
    for result in results:
        row = result.row
        if (new_heading := _find_heading(row.key, row.baseline)) != heading:
            heading = new_heading
            lines += [heading] if heading else []
        title = f"  {row.title}" if heading else row.title
        if result.measurement is None:
            lines.append(f"{title:<{width}}  {result.problem}")
        else:
            lines.append(_join(width, (title, *_make_cells(result.measurement, measured.get(row.baseline)))))
    return lines + warn_if_noisy([result.measurement for result in results if result.measurement is not None])


def warn_if_noisy(measurements: list[Measurement]) -> list[str]:
    """Returns a warning if equal steps took different times, so that small differences are noise."""
    widest = max((measurement.spread for measurement in measurements), default=0.0)
    if widest <= NOISY_SPREAD:
        return []
    return [f"the interquartile range of a row's step times is up to {widest:.0%} of the median: is this machine busy?"]


def describe_measurement(measurement: Measurement, steps: int, warm_up: int) -> list[str]:
    """Describes a measurement, one metric per line."""
    is_compiled = "compiled" in measurement.precision
    cache = ", compile cache miss" if measurement.compiled_anew else ", compile cache hit"
    speed = f"median of {steps:,} steps of {measurement.tokens_per_step:,} tokens, after {warm_up:,} warm-up steps"
    lines = {
        "tokens/s": f"{measurement.tokens_per_second:,.0f} ({speed})",
        "step": f"{measurement.step_seconds * 1e3:,.1f} ms",
        "MFU": _describe_mfu(measurement),
        "peak memory": f"{measurement.memory_gb:.2f} GB",
        "start to first step": f"{measurement.first_step_seconds:.1f} s{cache if is_compiled else ''}",
        "waiting for data": f"{measurement.data_wait:.2%} of the time",
        "clocks": describe_clocks(measurement.clocks),
    }
    return [f"{name:<22}{text}" for name, text in lines.items() if text] + warn_if_noisy([measurement])


def describe_clocks(clocks: dict[str, float]) -> str:
    """Describes the GPU's clocks; empty if they are unknown."""
    shown = {
        "sm_mhz": "{:,.0f} MHz",
        "max_sm_mhz": "of max {:,.0f}",
        "memory_mhz": "memory {:,.0f} MHz",
        "watts": "{:,.0f} W",
        "celsius": "{:,.0f} °C",
    }
    return ", ".join(text.format(clocks[name]) for name, text in shown.items() if name in clocks)


def _find_heading(key: str, baseline: str) -> str:
    if key == ALL_KEY or not baseline:
        return ""
    return {
        NAIVE_KEY: "each alone, against naive",
        PLAIN_KEY: "architecture, each alone, against separate QKV, GELU and untied embeddings",
        BF16_KEY: "with mixed precision, against mixed precision alone",
        ALL_KEY: "one removed or added, against all together",
    }[baseline]


def _make_cells(measurement: Measurement, baseline: Measurement | None) -> tuple[str, ...]:
    speed = memory = UNKNOWN
    if baseline is not None:
        speed = f"{measurement.tokens_per_second / baseline.tokens_per_second:.2f}x"
        if baseline.memory_gb:
            change = round(measurement.memory_gb / baseline.memory_gb - 1, 2)
            memory = f"{change or 0.0:+.0%}"  # avoids -0%
    mfu = UNKNOWN if measurement.mfu is None else f"{measurement.mfu:.1%}"
    memory_gb = f"{measurement.memory_gb:.2f}" if measurement.memory_gb else UNKNOWN
    return f"{measurement.tokens_per_second:,.0f}", speed, memory_gb, memory, mfu


def _join(width: int, cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<{width}}" + "".join(f"{cell:>12}" for cell in cells[1:])


def _describe_mfu(measurement: Measurement) -> str:
    rate = "" if measurement.tflops is None else format_rate(measurement.tflops)
    if measurement.mfu is None:
        return f"unknown for this device{f' ({rate})' if rate else ''}"
    return f"{measurement.mfu:.1%}{f' ({rate})' if rate else ''}"
