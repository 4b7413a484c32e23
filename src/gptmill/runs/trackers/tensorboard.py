"""TensorBoard: charts, samples, histograms, the config and the HParams tab."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gptmill.runs.events import CheckpointSaved, Event
from gptmill.runs.trackers.tensorboard_file import EVENT_FILE, EventFile
from gptmill.runs.trackers.tensorboard_summaries import SHOWN_EVENTS

MAX_UNFLUSHED = 1000


class TensorBoard:
    """Writes one event file per process, and another one after each rollback or failed write.

    Each file's purge step makes TensorBoard discard the later steps of the files before it.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        self._unflushed: list[Event] = []
        self._file = EventFile(folder, resumed_at + 1 if resumed_at else None)

    def track(self, event: Event) -> None:
        try:
            if isinstance(event, SHOWN_EVENTS):
                self._unflushed.append(event)
                self._file.add(event)
            # After a kill, no step up to the checkpoint may be missing from the curves.
            if isinstance(event, CheckpointSaved) or len(self._unflushed) >= MAX_UNFLUSHED:
                self._flush()
        except OSError:
            self._start_over()

    def rewind(self, step: int) -> None:
        self.close()
        self._file = EventFile(self._folder, step + 1)

    def close(self) -> None:
        try:
            self._flush()
        except OSError:
            self._start_over()
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        self._unflushed.clear()

    def _start_over(self, attempts: int = 3) -> None:
        """Writes the unflushed events to a new file: the old one takes no more after an error."""
        with suppress(OSError):
            self._file.close()
        try:
            self._file = EventFile(self._folder, min((event.step for event in self._unflushed), default=None))
            for event in self._unflushed:
                self._file.add(event)
            self._flush()
        except OSError:
            if attempts == 1:
                raise
            self._start_over(attempts - 1)


def has_tensorboard_files(folder: Path) -> bool:
    return any(EVENT_FILE.match(path.name) for path in folder.glob("*"))
