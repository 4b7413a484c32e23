"""The progress of preparing, drawn only once there is some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gptmill.data.prepare import PrepareProgress, Report


@contextmanager
def show_preparing() -> Iterator[Report]:
    """A function to report progress to; a bar appears with the first report and goes at the end."""
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, TextColumn("{task.fields[tokens]:,} tokens"), console=Console(stderr=True))
    task = bar.add_task("", total=None, tokens=0)

    def report(progress: PrepareProgress) -> None:
        if not bar.live.is_started and progress.bytes_done < progress.bytes_total:
            bar.start()
        bar.update(task, total=progress.bytes_total, completed=progress.bytes_done, tokens=progress.tokens)
        if progress.bytes_done >= progress.bytes_total and bar.live.is_started:
            bar.stop()

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
