"""Progress of long operations: a bar in a terminal, a text in a notebook's cell, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import ControlType

from gptmill.data.pipeline.prepare_progress import PrepareProgress, Report
from gptmill.runtime.interactive import CellText, Screen, is_notebook

PLAIN_SECONDS = 10.0


class Speed:
    """Throughput of this attempt; what an earlier attempt had finished does not count."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def measure(self, progress: PrepareProgress) -> float:
        """Megabytes of text per second."""
        return (progress.text_bytes - progress.resumed_text_bytes) / max(time.monotonic() - self._started, 1e-3) / 1e6

    def estimate_left(self, progress: PrepareProgress) -> float | None:
        """Seconds left; None while there is nothing to estimate from."""
        bytes_new = progress.bytes_done - progress.resumed_bytes
        if bytes_new <= 0 or not progress.bytes_total:
            return None
        return (progress.bytes_total - progress.bytes_done) * (time.monotonic() - self._started) / bytes_new


def report_nothing(_progress: PrepareProgress) -> None:
    """For callers that want no progress shown."""


@contextmanager
def show_preparing() -> Iterator[Report]:
    """Yields a function that reports progress; shows nothing until it is called."""
    console = Screen(stderr=True)
    if is_notebook():
        yield _make_cell_report(CellText())
        return
    if not console.is_terminal:
        yield _make_plain_report(console)
        return
    bar = Progress(
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[speed]:.1f} MB/s of text, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None, tokens=0, speed=0.0)
    speed = Speed()

    def report(progress: PrepareProgress) -> None:
        if bar.live.is_started == progress.is_done:
            bar.stop() if progress.is_done else bar.start()
        bar.update(
            task,
            total=progress.bytes_total or None,
            completed=progress.bytes_done,
            tokens=progress.tokens,
            speed=speed.measure(progress),
        )

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def _make_plain_report(console: Console) -> Report:
    last_line = time.monotonic()
    speed = Speed()

    def report(progress: PrepareProgress) -> None:
        nonlocal last_line
        if time.monotonic() - last_line < PLAIN_SECONDS:
            return
        last_line = time.monotonic()
        console.print(_describe(progress, speed))

    return report


def _make_cell_report(output: CellText) -> Report:
    speed = Speed()

    def report(progress: PrepareProgress) -> None:
        output.show(_describe(progress, speed), at_once=progress.is_done)

    return report


def _describe(progress: PrepareProgress, speed: Speed) -> str:
    total = f" of {progress.bytes_total / 1e6:,.0f}" if progress.bytes_total else ""
    done = f"{progress.bytes_done / 1e6:,.0f}{total} MB read, {progress.tokens:,} tokens"
    left = speed.estimate_left(progress)
    ending = f", {left:,.0f} s left" if left is not None else ""
    return f"preparing: {done}, {speed.measure(progress):.1f} MB/s of text{ending}"


@contextmanager
def show_amount(action: str, unit: str = "MB") -> Iterator[Callable[[int, int], None]]:
    """Yields a function that reports (done, total); with unit MB these are bytes."""
    console = Screen(stderr=True)
    is_terminal = console.is_terminal and not is_notebook()
    scale = 1e6 if unit == "MB" else 1.0
    started = last_line = time.monotonic()

    def show(line: str) -> None:
        console.print(line, end="" if is_terminal else "\n")
        if is_terminal:
            console.control(Control(ControlType.CARRIAGE_RETURN))

    def report(done: int, total: int) -> None:
        nonlocal last_line
        now = time.monotonic()
        if now - last_line < (1.0 if is_terminal else PLAIN_SECONDS):
            return
        last_line = now
        left = f", {(total - done) * (now - started) / done:,.0f} s left" if done else ""
        line = f"{action}: {done / scale:,.0f} of {total / scale:,.0f} {unit}{left}"
        show(line)

    yield report
    if is_terminal:
        show(" " * 60)


@contextmanager
def show_reading() -> Iterator[Callable[[int], None]]:
    """Yields a function that reports bytes read: on one updated line in a terminal, now and then elsewhere."""
    console = Screen(stderr=True)
    last_line = time.monotonic()
    with console.status("reading") as status:

        def report(text_bytes: int) -> None:
            nonlocal last_line
            line = f"training on {text_bytes / 1e6:,.0f} MB of text"
            if console.is_terminal:
                status.update(line)
            elif time.monotonic() - last_line > PLAIN_SECONDS:
                last_line = time.monotonic()
                console.print(line)

        yield report
