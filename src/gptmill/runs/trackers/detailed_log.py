"""train.log: all that the console says, with every logged step, for people who follow a run with `tail -f`."""

from __future__ import annotations

import time
from pathlib import Path

from gptmill.runs.append_file import AppendOnlyFile
from gptmill.runs.events import Event, StepLogged
from gptmill.runs.trackers.narration import Narrator

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class DetailedLog:
    """Appends each line with its time. A chronicle: steps that a crash or a rollback repeats are there twice."""

    def __init__(self, path: Path) -> None:
        self._file = AppendOnlyFile(path)
        self._file.keep_only(lambda _line: True)  # drops a line that a kill cut short
        self._narrator = Narrator()

    def track(self, event: Event) -> None:
        lines = self._narrator.describe(event)
        if isinstance(event, StepLogged):
            lines.append(self._narrator.describe_step(event))
        moment = time.strftime(TIME_FORMAT, time.localtime(event.time))
        for line in lines:
            for text in line.text.split("\n"):
                self._file.write_line(f"{moment} {text}")

    def rewind(self, step: int) -> None:
        self._narrator.rewind(step)

    def close(self) -> None:
        self._file.close()
