"""Trackers that write plain files: events.jsonl, log.txt and samples/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gptmill.data.files import write_durably
from gptmill.runs.events import EvalDone, Event, SampleDrawn, StepLogged, to_json


class JsonLines:
    """Every event, one JSON object a line."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        _drop_later_lines(path, resumed_at, lambda line: int(json.loads(line)["step"]))
        self._file = path.open("a", encoding="utf-8")

    def track(self, event: Event) -> None:
        self._file.write(to_json(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TextLog:
    """`250 train 3.456789` and `250 val 3.4568`."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        _drop_later_lines(path, resumed_at, lambda line: int(line.split()[0]))
        self._file = path.open("a", encoding="utf-8")

    def track(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            self._file.write(f"{event.step} train {event.loss:.6f}\n")
        elif isinstance(event, EvalDone):
            self._file.write(f"{event.step} val {event.val_loss:.4f}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class SampleFiles:
    """One text file per sample, named by its step."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        for path in folder.glob("step_*.txt"):
            step = path.stem.removeprefix("step_")
            if step.isascii() and step.isdigit() and int(step) > resumed_at:
                path.unlink()

    def track(self, event: Event) -> None:
        if isinstance(event, SampleDrawn):
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"step_{event.step:06d}.txt").write_text(event.prompt + event.text + "\n", encoding="utf-8")

    def close(self) -> None:
        pass


def _drop_later_lines(path: Path, resumed_at: int, read_step: Callable[[str], int]) -> None:
    """Keeps the lines of steps up to `resumed_at`; also drops a line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    whole_lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for line in whole_lines:
        try:
            if read_step(line) <= resumed_at:
                kept.append(line + "\n")
        except (ValueError, KeyError, IndexError, TypeError):
            continue
    write_durably(path, "".join(kept))
