"""The progress of preparing: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gptmill.data.prepare import PrepareProgress, Report

PLAIN_SECONDS = 10.0


@contextmanager
def show_preparing() -> Iterator[Report]:
    """A function to report progress to; nothing is shown until it is called."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _make_plain_report(console)
        return
    bar = Progress(
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None, tokens=0)

    def report(progress: PrepareProgress) -> None:
        is_done = progress.bytes_done >= progress.bytes_total
        if bar.live.is_started == is_done:
            bar.stop() if is_done else bar.start()
        bar.update(task, total=progress.bytes_total, completed=progress.bytes_done, tokens=progress.tokens)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def _make_plain_report(console: Console) -> Report:
    started = last_line = time.monotonic()

    def report(progress: PrepareProgress) -> None:
        nonlocal last_line
        now = time.monotonic()
        if now - last_line < PLAIN_SECONDS:
            return
        last_line = now
        speed = progress.bytes_done / (now - started)
        left = (progress.bytes_total - progress.bytes_done) / max(speed, 1.0)
        done = f"{progress.bytes_done / 1e6:,.0f} of {progress.bytes_total / 1e6:,.0f} MB"
        console.print(f"preparing: {done}, {progress.tokens:,} tokens, {speed / 1e6:.1f} MB/s, {left:,.0f} s left")

    return report
