"""Trackers that write plain files: events.jsonl, log.txt and samples/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gptmill.config.json_text import parse_record
from gptmill.runs.append_file import AppendOnlyFile
from gptmill.runs.event_json import to_json
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


class JsonLines:
    """Writes every event but histograms as one JSON object per line."""

    def __init__(self, path: Path, resumed_at: int, *, is_evaluated: bool = True) -> None:
        self._file = AppendOnlyFile(path)
        self.rewind(resumed_at, is_evaluated=is_evaluated)

    def track(self, event: Event) -> None:
        if not isinstance(event, HistogramsTaken):
            self._file.write_line(to_json(event))

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        """Drops later steps; unless `is_evaluated`, the evaluation of this step too, which is to be repeated."""

        def read_position(line: str) -> tuple[int, bool]:
            record = parse_record(line)  # not an Event: those that a newer version added are kept
            return int(record["step"]), record["event"] in EVALUATION_NAMES

        _drop_later_lines(self._file, (step, is_evaluated), read_position)

    def close(self) -> None:
        self._file.close()


class TextLog:
    """Writes lines such as `250 train 3.456789`, `250 val 3.4568`, `250 train_eval 3.4321`, `250 EVALUATOR 0.2340`."""

    def __init__(self, path: Path, resumed_at: int, *, is_evaluated: bool = True) -> None:
        self._file = AppendOnlyFile(path)
        self.rewind(resumed_at, is_evaluated=is_evaluated)

    def track(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            self._file.write_line(f"{event.step} train {event.loss:.6f}")
        elif isinstance(event, EvalDone):
            self._file.write_line(f"{event.step} val {event.val_loss:.4f}")
        elif isinstance(event, TrainEvalDone):
            self._file.write_line(f"{event.step} train_eval {event.train_loss:.4f}")
        elif isinstance(event, ScoresDone):
            for name, score in event.scores.items():
                self._file.write_line(f"{event.step} {name} {score:.4f}")

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        _drop_later_lines(self._file, (step, is_evaluated), lambda line: (int(line.split()[0]), " train " not in line))

    def close(self) -> None:
        self._file.close()


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


def _drop_later_lines(
    file: AppendOnlyFile, last: tuple[int, bool], read_position: Callable[[str], tuple[int, bool]]
) -> None:
    """Keeps the lines up to `last`, a step and whether its evaluation is included; drops invalid lines too."""

    def is_kept(line: str) -> bool:
        try:
            return read_position(line) <= last
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
            return False

    file.keep_only(is_kept)
