"""Trackers that write plain files: events.jsonl, log.txt and samples/; and what a resume finds damaged in the first."""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from gptmill.config.json_text import parse_record
from gptmill.config.regular_files import measure_regular, open_regular
from gptmill.data.files import write_durably
from gptmill.runs.append_file import AppendOnlyFile, Extent
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import to_json
from gptmill.runs.event_log import iterate_lines, parse_event
from gptmill.runs.events import (
    EVALUATIONS,
    EvalDone,
    Event,
    HistogramsTaken,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
)

EVALUATION_NAMES = tuple(kind.__name__ for kind in EVALUATIONS)
BLOCK_BYTES = 1 << 20


class LineFile(ABC):
    """A file of lines that belong to a step each."""

    def __init__(self, path: Path, resumed_at: int, *, is_evaluated: bool = True) -> None:
        self.path = path
        self._file = AppendOnlyFile(path)
        self.rewind(resumed_at, is_evaluated=is_evaluated)

    @property
    def extent(self) -> Extent:
        return self._file.extent

    def track(self, event: Event) -> None:
        for line in self.list_lines(event):
            self._file.write_line(line)

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        """Drops later steps; unless `is_evaluated`, the evaluation of this step too, which is to be repeated.

        Drops invalid lines too.
        """
        self._file.keep_only(
            lambda line: (found := self.find_position(line)) is not None and found <= (step, is_evaluated)
        )

    def close(self) -> None:
        self._file.close()

    @classmethod
    def find_position(cls, line: str) -> tuple[int, bool] | None:
        """The step of a line and whether it is of an evaluation; None for an invalid line."""
        try:
            return cls.read_position(line)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
            return None

    @staticmethod
    @abstractmethod
    def list_lines(event: Event) -> list[str]: ...

    @staticmethod
    @abstractmethod
    def read_position(line: str) -> tuple[int, bool]: ...


class JsonLines(LineFile):
    """Writes every event but histograms as one JSON object per line."""

    @staticmethod
    def list_lines(event: Event) -> list[str]:
        return [] if isinstance(event, HistogramsTaken) else [to_json(event)]

    @staticmethod
    def read_position(line: str) -> tuple[int, bool]:
        record = parse_record(line)  # not an Event: those that a newer version added are kept
        return int(record["step"]), record["event"] in EVALUATION_NAMES


class TextLog(LineFile):
    """Writes lines such as `250 train 3.456789`, `250 val 3.4568`, `250 train_eval 3.4321`, `250 EVALUATOR 0.2340`."""

    @staticmethod
    def list_lines(event: Event) -> list[str]:
        if isinstance(event, StepLogged):
            return [f"{event.step} train {event.loss:.6f}"]
        if isinstance(event, EvalDone):
            return [f"{event.step} val {event.val_loss:.4f}"]
        if isinstance(event, TrainEvalDone):
            return [f"{event.step} train_eval {event.train_loss:.4f}"]
        if isinstance(event, ScoresDone):
            return [f"{event.step} {name} {score:.4f}" for name, score in event.scores.items()]
        return []

    @staticmethod
    def read_position(line: str) -> tuple[int, bool]:
        return int(line.split()[0]), " train " not in line


class SampleFiles:
    """Writes one text file per evaluation, named by its step: the sample, or several with their names."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        self.rewind(resumed_at)

    def track(self, event: Event) -> None:
        if not isinstance(event, SampleDrawn):
            return
        path = self._folder / f"step_{event.step:06d}.txt"
        try:
            self._folder.mkdir(exist_ok=True)
            path.write_text(_format_samples(event), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                sys.stderr.write(f"warning: the sample of step {event.step} is lost: {error}\n")

    def rewind(self, step: int) -> None:
        for path in self._folder.glob("step_*.txt"):
            number = path.stem.removeprefix("step_")
            if number.isascii() and number.isdigit() and int(number) > step:
                path.unlink()

    def close(self) -> None:
        pass


def _format_samples(event: SampleDrawn) -> str:
    if not event.more_texts:
        return f"{event.prompt}{event.text}\n"
    return "".join(f"> {name}: {event.prompt}{text}\n" for name, text in event.texts.items())


def set_aside_damaged(run: RunDirectory, recorded: Mapping[str, Extent]) -> list[str]:
    """Compares events.jsonl and log.txt with their extents at a checkpoint; returns a sentence about each damaged one.

    Keeps a copy of a damaged file. Writes log.txt again from events.jsonl if that is not damaged.
    """
    damaged = [
        path
        for path in (run.events, run.text_log)
        if path.name in recorded and path.is_file() and not _begins_with(path, recorded[path.name])
    ]
    rebuilt = _rebuild_text_log(run, recorded) if damaged == [run.text_log] else b""
    places = [_find_damage(path, recorded[path.name], rebuilt) for path in damaged]
    return [
        f"{path} is damaged: {place}; {_set_aside(path, rebuilt)}" for path, place in zip(damaged, places, strict=True)
    ]


def _begins_with(path: Path, extent: Extent) -> bool:
    found = Extent(0, 0)
    with suppress(OSError), open_regular(path) as file:
        while block := file.read(min(BLOCK_BYTES, extent.length - found.length)):
            found = found.extend(block)
    return found == extent


def _rebuild_text_log(run: RunDirectory, recorded: Mapping[str, Extent]) -> bytes:
    """Makes log.txt from events.jsonl; empty unless that gives what a checkpoint recorded."""
    lines: list[str] = []
    left = recorded.get(run.events.name, Extent(0, 0)).length
    with suppress(OSError):
        for line in iterate_lines(run.events):
            left -= len(line)
            if left >= 0 and (event := parse_event(line.decode(errors="replace"))) is not None:
                lines += TextLog.list_lines(event)
    content = "".join(f"{line}\n" for line in lines).encode()
    return content if Extent(0, 0).extend(content) == recorded[run.text_log.name] else b""


def _find_damage(path: Path, extent: Extent, rebuilt: bytes) -> str:
    """Describes where a damaged file differs from what was written, as far as that is known."""
    kind, right = TextLog if path.suffix == ".txt" else JsonLines, rebuilt.split(b"\n")
    try:
        if (size := measure_regular(path)) < extent.length:
            return f"{size:,} of {extent.length:,} bytes are left"
        for number, line in enumerate(iterate_lines(path)):
            is_known = number < len(right) - 1
            text = line.removesuffix(b"\n")
            if text != right[number] if is_known else kind.find_position(text.decode(errors="replace")) is None:
                return f"line {number + 1:,} is not as it was written"
    except OSError as error:
        return error.strerror or str(error)
    return f"its first {extent.length:,} bytes are not as they were written"


def _set_aside(path: Path, rebuilt: bytes) -> str:
    """Copies a damaged file, then writes the right content if it is known; says what was done."""
    names = (f"{path.name}.damaged{f'_{number}' if number > 1 else ''}" for number in count(1))
    copy = next(free for name in names if not (free := path.with_name(name)).exists())
    going_on = "the run goes on with the lines that can be read"
    try:
        shutil.copyfile(path, copy)
        if not rebuilt:
            return f"a copy is {copy.name}, and {going_on}"
        write_durably(path, rebuilt.decode())
    except OSError as error:
        return f"it could not be copied or replaced ({error.strerror or error}), and {going_on}"
    return f"a copy is {copy.name}, and the lines were written again from events.jsonl"
