"""The console tracker: a live display in a terminal, a text in a notebook's cell, plain lines in files and pipes."""

from __future__ import annotations

import math
import re
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from gptmill.runs.display import make_writable
from gptmill.runs.events import Event, LastStepMoved, RunFinished, RunStarted, StepLogged
from gptmill.runs.trackers.cell_display import CellDisplay
from gptmill.runs.trackers.event_lines import Line, LineKind, format_seconds, list_learning, list_speed
from gptmill.runs.trackers.narration import Narrator
from gptmill.runs.trackers.protocol import Tracker
from gptmill.runtime.interactive import CellText, Screen, is_notebook

PLAIN_SECONDS = 5.0  # between two lines, whatever the speed
STYLES: dict[LineKind, str] = {"evaluation": "bold", "incident": "yellow", "end": "bold"}


def build_console(print_freq: int | None = None) -> Tracker:
    """Returns a live display if standard output is a terminal or a notebook, else plain lines.

    With `print_freq`, every so many steps get a line.
    """
    if is_notebook():
        return CellDisplay(CellText())
    console = Screen(highlight=False)
    is_live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console, print_freq) if is_live else PlainLines(console, print_freq)


class PlainLines:
    """Prints the first and the last step, every evaluation with its samples, and a step every few seconds between."""

    def __init__(self, console: Console, print_freq: int | None = None) -> None:
        self._console = console
        self._print_freq = print_freq
        self._narrator = Narrator(console.encoding)
        self._last_line = -math.inf

    def track(self, event: Event) -> None:
        for line in self._narrator.describe(event):
            self._print(line)
        if isinstance(event, StepLogged) and self._is_due(event):
            self._last_line = time.monotonic()
            self._print(self._narrator.describe_step(event))

    def rewind(self, step: int) -> None:
        self._narrator.rewind(step)

    def close(self) -> None:
        pass

    def _is_due(self, event: StepLogged) -> bool:
        if self._print_freq is not None:
            return is_print_due(self._print_freq, event, self._narrator.max_steps)
        return time.monotonic() - self._last_line >= PLAIN_SECONDS or event.step == self._narrator.max_steps

    def _print(self, line: Line) -> None:
        self._console.print(make_writable(line.text, self._console.encoding), markup=False, soft_wrap=True)


class LiveDisplay:
    """Shows a progress bar and the latest metrics, with evaluations and samples scrolling above them."""

    def __init__(self, console: Console, print_freq: int | None = None) -> None:
        columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("eta {task.fields[eta]}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=None, eta="…")
        self._console = console
        self._print_freq = print_freq
        self._narrator = Narrator(console.encoding)
        self._metrics = Text()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def track(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            self.close()
        for line in self._narrator.describe(event):
            self._print(line)
        if isinstance(event, RunStarted):
            self._progress.update(self._task, total=event.max_steps, completed=event.step)
            self._live.start()
        elif isinstance(event, LastStepMoved):
            self._progress.update(self._task, total=event.max_steps)
        elif isinstance(event, StepLogged):
            self._show_step(event)

    def rewind(self, step: int) -> None:
        self._narrator.rewind(step)
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._live.stop()

    def _show_step(self, event: StepLogged) -> None:
        self._progress.update(self._task, completed=event.step, eta=format_seconds(event.seconds_left))
        learning = " | ".join(list_learning(event, self._narrator.val_loss))
        speed = " | ".join(list_speed(event, self._narrator.device_memory_gb))
        self._metrics = Text(f"{learning}\n{speed}")
        if self._print_freq is not None and is_print_due(self._print_freq, event, self._narrator.max_steps):
            self._print(self._narrator.describe_step(event))

    def _print(self, line: Line) -> None:
        if line.kind == "start":
            self._console.print(make_grid(make_writable(line.text, self._console.encoding)))
            return
        text = Text(make_writable(line.text, self._console.encoding), STYLES.get(line.kind, ""))
        if line.num_faint:
            text.stylize("dim", 0, line.num_faint)
        self._console.print(text)

    def _render(self) -> Group:
        return Group(self._progress, self._metrics)


def make_grid(text: str) -> Table:
    """The rows of a start, of which long ones are continued below their beginning."""
    grid = Table.grid(padding=(0, 2))
    for row in text.split("\n"):
        name, *content = re.split(" {2,}", row, maxsplit=1)
        grid.add_row(Text(name, "cyan"), Text("".join(content)))
    return grid


def is_print_due(print_freq: int, event: StepLogged, max_steps: int) -> bool:
    return event.step % print_freq == 0 or event.step in (1, max_steps)
